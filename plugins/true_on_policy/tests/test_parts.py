"""Products, elementwise functions and attention: each row's bits do not depend on the other rows."""

from types import SimpleNamespace

import pytest
import torch
from attention_calls import MODULE, OPTIONS, heads, packed
from torch import nn
from torch.nn import functional

from miles_core.contracts.trainer import Context
from miles_core.plugin import ConfigError
from miles_embedded import PromptCall, load_model, routed_blocks
from miles_embedded.model import joint_linear
from miles_embedded.testing.families import family_checkpoint
from miles_testing.tiny import tiny_checkpoint
from miles_true_on_policy import hooks
from miles_true_on_policy.attention import attend
from miles_true_on_policy.elementwise import apply_aligned, whole_vectors
from miles_true_on_policy.mode import REPLACED, Invariant, skip_mode
from miles_true_on_policy.products import multiply_groups, multiply_rows

SIZES = (1, 5, 7, 31, 33, 1000, 65537)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["silu", "gelu", "softplus", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise(threads, name, dtype):
    function = getattr(functional, name)
    x = torch.randn(1 << 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = torch.cat([function(part) for part in x.split(1 << 10)])
    for size in SIZES:
        assert torch.equal(apply_aligned(function, x[:size].clone()), whole[:size])


def test_shares_of_threads_are_whole_vectors():
    for count in (1, 64, 32768, 32769, 100003):
        for threads in (1, 2, 3, 7):
            padded = whole_vectors(count, threads)
            used = max(1, min(threads, -(-padded // 32768)))
            assert padded >= count and padded % (64 * used) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products(threads, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 96, generator=generator).to(dtype)
    weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((80, 96), (80,)))
    whole = multiply_rows(x, weight, bias)
    for rows in (1, 2, 3, 7, 33, 150):
        assert torch.equal(multiply_rows(x[4 : 4 + rows], weight, bias), whole[4 : 4 + rows])
    torch.testing.assert_close(whole, functional.linear(x, weight, bias))
    ends = torch.tensor([3, 3, 40, 200], dtype=torch.int32)
    matrices = torch.randn(4, 96, 16, generator=generator).to(dtype)
    grouped = multiply_groups(x, matrices, ends)
    assert torch.equal(grouped[3:40], multiply_groups(x[3:40], matrices[2:3], torch.tensor([37])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_that_are_added_to_a_tensor(dtype):
    """As adapters compute them: rows without gradient, and packed rows with one."""
    generator = torch.Generator().manual_seed(1)
    x, inner, matrix = (torch.randn(*s, generator=generator).to(dtype) for s in ((200, 80), (200, 16), (16, 80)))
    with Invariant():
        whole = x.clone().addmm_(inner, matrix, alpha=2.0)
        for rows in (1, 7, 33):
            part = inner[None, 4 : 4 + rows].requires_grad_()
            packed = x[None, 4 : 4 + rows].clone()
            assert torch.equal(packed.baddbmm_(part, matrix[None], alpha=2.0), whole[None, 4 : 4 + rows])
            packed.sum().backward()
    torch.testing.assert_close(whole, x + 2 * inner @ matrix)


@pytest.mark.parametrize(("family", "logits"), [("qwen3_moe", torch.bfloat16), ("deepseek_v3", torch.float32)])
def test_routers(threads, family, logits, tmp_path):
    """A router's logits, in FP32 where the family computes them so, its choice and its weights are those of the row."""
    model = load_model(family_checkpoint(family, tmp_path), "bfloat16", "cpu")
    routed, seen = routed_blocks(model)[0], []
    routed.on_logits(seen.append)
    routed.experts.register_forward_hook(lambda module, args, output: seen.extend(args[1:]))
    x = torch.randn(200, model.config.hidden_size, generator=torch.Generator().manual_seed(5)).bfloat16()

    def route(rows):
        seen.clear()
        with Invariant(), torch.no_grad():
            routed.block(rows[None])
        return [found.clone() for found in seen]

    whole = route(x)
    assert len(whole) == 3 and whole[0].dtype == logits
    for rows in (1, 2, 7, 33, 150):
        part = route(x[4 : 4 + rows])
        assert all(torch.equal(few, all_[4 : 4 + rows]) for few, all_ in zip(part, whole, strict=True))


@pytest.mark.parametrize("rows", [1, 16, 100, 511, 512, 700, 20000, 33300, 40000])
def test_pieces_are_few_and_cover_all_rows(triton, rows):
    from miles_true_on_policy.library import SIZES, divide

    pieces = divide(rows)
    covered = {row for first, size in pieces for row in range(first, first + size)}
    assert covered == set(range(pieces[0][1] if len(pieces) == 1 else rows)) and len(covered) >= rows
    assert all(size in SIZES for _, size in pieces) and len(pieces) <= rows // SIZES[-1] + 2
    assert sum(size for _, size in pieces) - rows < 512


def test_the_mode_reaches_every_product_of_a_forward():
    x, weight = torch.randn(3, 64), torch.randn(48, 64)
    with Invariant():
        found = [functional.linear(x, weight), x @ weight.t(), torch.mm(x, weight.t()), x.matmul(weight.t())]
    assert all(torch.equal(each, multiply_rows(x, weight)) for each in found)


def test_the_mode_does_not_see_what_skips_it(monkeypatch):
    monkeypatch.setitem(REPLACED, torch.neg, torch.abs)
    x = torch.ones(2)
    with Invariant():
        replaced, skipped = torch.neg(x), skip_mode(torch.neg)(x)
    assert replaced.tolist() == [1, 1] and skipped.tolist() == [-1, -1]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_a_branch_is_that_of_its_sequence(name, dtype):
    trunk, lengths = 70, [9, 1, 64]
    qkv = heads(trunk + sum(lengths), torch.Generator().manual_seed(2), dtype)
    found = attend(packed(lengths, trunk), MODULE, *qkv, 0.25, OPTIONS[name])
    start = trunk
    for length in lengths:
        rows = torch.cat([torch.arange(trunk), torch.arange(start, start + length)])
        call = PromptCall(Context("rollout", (0,), rows), [len(rows)])
        alone = attend(call, MODULE, *(x[:, :, rows] for x in qkv), 0.25, OPTIONS[name])
        assert torch.equal(found[:, rows], alone)
        start += length


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_and_its_gradients_are_those_of_the_call(name):
    options, call = OPTIONS[name], packed([9, 3], 20)
    qkv = [x.double().requires_grad_() for x in heads(32, torch.Generator().manual_seed(3))]
    found, expected = attend(call, MODULE, *qkv, 0.25, options), call.attend(MODULE, *qkv, 0.25, options)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for one, two in zip(
        torch.autograd.grad(found, qkv, weights), torch.autograd.grad(expected, qkv, weights), strict=True
    ):
        torch.testing.assert_close(one, two)


def test_a_product_that_depends_on_the_number_of_rows_is_named(monkeypatch):
    monkeypatch.setattr(hooks, "has_exact_rows", lambda columns, inner, *rest: columns != 5)
    with pytest.raises(
        ConfigError, match=r"the product with 1\.weight \(5 x 3, float32\) depends on the number of rows"
    ):
        hooks.check_products(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 5)))


def test_layers_that_are_multiplied_as_one_matrix_stay_so_and_the_matrix_is_tried(monkeypatch, tmp_path):
    model = load_model(tiny_checkpoint("qwen3", tmp_path / "model"), "float32", "cpu")
    monkeypatch.setattr(joint_linear, "_plain", lambda layer: type(layer) is nn.Linear)  # else on a GPU only
    assert joint_linear.join_linear(model) == 2 * model.config.num_hidden_layers
    tried = set()
    monkeypatch.setattr(hooks, "has_exact_rows", lambda columns, inner, *rest: not tried.add((columns, inner)))
    hooks.make_invariant(model)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for layers in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        assert all("forward" in layer.__dict__ for layer in layers)
        assert (sum(layer.out_features for layer in layers), layers[0].in_features) in tried
    assert "forward" not in attention.o_proj.__dict__


def test_keys_that_an_indexer_chose_are_refused():
    options = SimpleNamespace(sinks=None, choice=object())
    with pytest.raises(ConfigError, match="keys that an indexer chose"):
        attend(packed([1], 1), MODULE, *heads(2, torch.Generator()), 0.25, options)
