"""Kernels whose order of additions is fixed: in Triton's interpreter where it is installed, and whole models on a GPU."""

import asyncio

import numpy as np
import pytest
import torch
from attention_calls import MODULE, packed

from miles_core.data import Sample, collate
from miles_embedded import load_model
from miles_embedded.testing.families import family_checkpoint
from miles_true_on_policy.hooks import make_invariant

HERE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(HERE == "cpu", reason="needs a CUDA device")


@pytest.fixture
def kernels(triton):
    from miles_true_on_policy import kernels

    return kernels


def test_values(kernels):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(HERE) for shape in ((2, 70, 70), (2, 70, 90)))
    torch.testing.assert_close(kernels.product(a, b), a @ b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        kernels.product(a[0:1], a[1:].transpose(1, 2)), a[0:1] @ a[1:].transpose(1, 2), rtol=1e-4, atol=1e-4
    )
    x = torch.randn(3, 2500, generator=generator).to(HERE)
    torch.testing.assert_close(kernels.sum_last(x), x.sum(-1), rtol=1e-5, atol=1e-3)


def test_gradients(kernels):
    inputs = [torch.randn(*shape, device=HERE, requires_grad=True) for shape in ((1, 5, 40), (1, 40, 6))]
    for ours, theirs in (
        (kernels.product, torch.bmm),
        (lambda a, b: kernels.sum_last(a) * b.sum(), lambda a, b: a.sum(-1) * b.sum()),
    ):
        found, expected = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (ours, theirs))
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 3, 16, 40, 70, 530])
def test_pieces_give_the_product_whoever_computes_them(kernels, monkeypatch, rows):
    from miles_true_on_policy import library

    device = torch.empty(0, device=HERE).device
    x, weight = torch.randn(rows, 32, device=HERE), torch.randn(24, 32, device=HERE)
    sizes = {size: size not in (16, 64) for size in library.SIZES if size <= 512}
    monkeypatch.setitem(library._equal, (24, 32, x.dtype, device), sizes)
    library._plan.cache_clear()
    plan = library._plan(rows, 24, 32, x.dtype, device)
    assert all(sizes[size] for _, size in plan) and bool(plan) == (rows > 0)
    torch.testing.assert_close(library.multiply_pieces(x, weight), x @ weight.t(), rtol=1e-4, atol=1e-4)
    library._plan.cache_clear()


def gap(checkpoint, dtype, exact, graphs=False, temperature=1.0):
    """Number of tokens, and the largest |difference| between engine and trainer over several micro-batches."""
    from miles_core.contracts.engine import Request, Sampling
    from miles_core.contracts.trainer import Callbacks
    from miles_core.train.optimizer import OptimizerConfig
    from miles_embedded.engine.engine import EmbeddedEngine
    from miles_embedded.engine.settings import Settings
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

    models = [load_model(checkpoint, dtype, "cuda") for _ in range(2)]
    if exact:
        for model in models:
            make_invariant(model)
    engine = EmbeddedEngine(
        models[0], Settings(str, eos=[], max_context=64, max_running_requests=5, cuda_graphs=graphs)
    )
    prompts = [[3, 4, 5]] * 3 + [[6, 7, 8, 9, 10, 11, 12, 13, 14]] * 2 + [[20] * 11, [2]]
    requests = [
        Request(p, Sampling(7 + 2 * i, temperature=temperature, ignore_eos=True), key=i) for i, p in enumerate(prompts)
    ]

    async def answers():
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    samples = []
    for i, (request, response) in enumerate(zip(requests, asyncio.run(answers()), strict=True)):
        samples.append(Sample(tokens=request.tokens + response.tokens, response_length=len(response.tokens), index=i))
        samples[-1].rollout_log_probs = response.log_probs
    expected = np.concatenate([np.asarray(s.rollout_log_probs, np.float32) for s in samples])
    batch, largest = collate(samples), 0.0
    for count in (1, 3, 100):
        trainer = EmbeddedTrainer(
            models[1], TrainerConfig(OptimizerConfig(), micro_batch_size=count, temperature=temperature)
        )
        trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
        found = trainer.log_probs(batch, "old")["log_probs"].cpu()[batch.mask.bool()].numpy()
        largest = max(largest, float(np.abs(found - expected).max()))
    refused = engine.async_steps.refused or engine.prompts.refused
    assert not (graphs and refused), refused
    return len(expected), largest


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma2"])
def test_the_gap_of_a_model_is_zero(family, dtype, tmp_path):
    checkpoint = family_checkpoint(family, tmp_path)
    tokens, exact = gap(checkpoint, dtype, True)
    _, plain = gap(checkpoint, dtype, False)
    assert tokens > 80 and exact == 0 < plain


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_gap_is_zero_with_cuda_graphs(family, temperature, tmp_path):
    tokens, exact = gap(family_checkpoint(family, tmp_path), "bfloat16", True, True, temperature)
    assert tokens > 80 and exact == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
def test_the_gap_of_a_run_is_zero(toy_run, family):
    """Training multiplies query, key and value apart; decoding multiplies them as one matrix."""
    options = {"family": family, "dtype": "bfloat16", "device": "cuda", "rollout_max_response_len": 24}
    exact, plain = (toy_run(plugins, **options) for plugins in (["true_on_policy"], []))
    gaps = [[record["mismatch/abs_log_prob"] for record in run.metrics] for run in (exact, plain)]
    assert gaps[0] == [0.0, 0.0] and min(gaps[1]) > 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_gap_is_zero_with_native_fp8_products_of_one_order(toy_run, family):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
    options = {"sizes": sizes, "dtype": "bfloat16", "device": "cuda", "quantized_product": "native"}
    options |= {"rollout_precision": "fp8", "train_precision": "fp8", "rollout_max_response_len": 24}
    exact = toy_run(["fp8", "true_on_policy"], family=family, fp8_fixed_order=True, **options)
    plain = toy_run(["fp8"], family=family, **options)
    gaps = [[record["mismatch/abs_log_prob"] for record in run.metrics] for run in (exact, plain)]
    assert gaps[0] == [0.0, 0.0] and min(gaps[1]) > 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inner", "columns"), [(70, 90), (1536, 2048), (1536, 8960), (8960, 1536), (1536, 151936)])
def test_a_row_of_a_product_depends_on_itself_only(kernels, inner, columns, dtype):
    x = torch.randn(1, 513, inner, device="cuda", dtype=dtype)
    weight = torch.randn(columns, inner, device="cuda", dtype=dtype).t()[None]
    whole = kernels.product(x, weight)
    for first, rows in ((0, 1), (1, 2), (3, 8), (64, 65), (5, 17), (200, 256)):
        piece = slice(first, first + rows)
        assert torch.equal(kernels.product(x[:, piece].contiguous(), weight), whole[:, piece])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("width", [64, 2500, 151936])
def test_a_sum_depends_on_its_row_only(kernels, width):
    x = torch.randn(300, width, device="cuda")
    whole = kernels.sum_last(x)
    for first, rows in ((0, 1), (7, 3), (40, 257)):
        assert torch.equal(kernels.sum_last(x[first : first + rows]), whole[first : first + rows])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("vocabulary", [64, 259, 151936])
def test_log_softmax_of_a_row_depends_on_it_only(kernels, vocabulary):
    from miles_true_on_policy.normalize import log_softmax

    x = torch.randn(300, vocabulary, device="cuda")
    whole = log_softmax(x)
    for i in (0, 1, 2, 3, 17, 250):
        assert torch.equal(log_softmax(x[i : i + 3].clone()), whole[i : i + 3])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("vocabulary", [64, 259, 32000, 151936])
def test_the_log_probability_of_a_token_depends_on_its_row_only(kernels, vocabulary):
    """One token of a decode step, and the same among those of a training batch."""
    from miles_true_on_policy.normalize import log_softmax, pick_log_softmax

    x = 4 * torch.randn(300, vocabulary, device="cuda")
    tokens = torch.randint(vocabulary, (300,), device="cuda")
    whole = pick_log_softmax(x, tokens)
    assert torch.equal(whole, log_softmax(x).gather(1, tokens[:, None])[:, 0])
    for first, rows in ((0, 1), (7, 3), (40, 257)):
        piece = slice(first, first + rows)
        assert torch.equal(pick_log_softmax(x[piece].clone(), tokens[piece]), whole[piece])
    narrow, divisor = x.bfloat16(), torch.linspace(0.3, 2, 300, device="cuda")[:, None]
    expected = log_softmax(narrow.float() / divisor).gather(1, tokens[:, None])[:, 0]
    assert torch.equal(pick_log_softmax(narrow, tokens, divisor), expected)
    assert torch.equal(
        pick_log_softmax(narrow[5:8], tokens[5:8], float(divisor[6])),
        pick_log_softmax(narrow[5:8], tokens[5:8], divisor[6:7]),
    )
    assert torch.equal(pick_log_softmax(narrow[6:7], tokens[6:7], float(divisor[6])), expected[6:7])
    assert torch.equal(pick_log_softmax(narrow, tokens), log_softmax(narrow.float()).gather(1, tokens[:, None])[:, 0])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (32, 4), (128, 8), (257, 16)])
def test_chosen_experts_are_those_of_a_stable_sort(kernels, experts, k):
    from miles_true_on_policy.choice import largest_entries

    x = torch.randint(2 * experts, (5000, experts), device="cuda").float().softmax(-1)
    values, index = largest_entries(x, k)
    expected, places = x.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected[:, :k]) and torch.equal(index, places[:, :k])


@pytest.mark.gpu
@needs_gpu
def test_products_of_the_libraries_depend_on_the_number_of_rows(kernels):
    """The negative control: without it, equality above would prove nothing about this machine."""
    x = torch.randn(513, 8960, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1536, 8960, device="cuda", dtype=torch.bfloat16)
    whole = torch.nn.functional.linear(x, weight)
    assert any(not torch.equal(torch.nn.functional.linear(x[:n], weight), whole[:n]) for n in (1, 8, 64, 200))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("inner", "columns"), [(1536, 2048), (8960, 1536), (1024, 32000), (70, 90)])
def test_pieces_of_the_library_have_the_bits_of_the_kernel(kernels, inner, columns):
    from miles_true_on_policy.library import SIZES, compare, multiply_pieces

    weight = torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16)
    equal = compare(columns, inner, weight.dtype, weight.device)
    print(f"{inner} x {columns}: {sum(equal.values())} of {len(SIZES)} sizes")
    for rows in (1, 16, 100, 700, 5000):
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(multiply_pieces(x, weight), kernels.product(x[None], weight.t()[None])[0])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (128, 128), (256, 256), (192, 128), (24, 16)])
@pytest.mark.parametrize("shared", [1, 4, 12])
def test_tiles_of_attention_give_the_same_bits(kernels, dim, value_dim, shared):
    from miles_true_on_policy.attention_kernel import _DECODE, _OTHERS, _WIDE, Place, attend_tiles, queries_of

    generator, rows = torch.Generator("cuda").manual_seed(0), 700
    shapes = ((2 * shared, dim), (2, dim), (2, value_dim))
    q, k, v = (torch.randn(rows, n, d, device="cuda", generator=generator).bfloat16() for n, d in shapes)
    found = []
    for tile in (_DECODE, _WIDE, next(tile for most, tile in _OTHERS.items() if dim <= most)):
        step = queries_of(tile, 2 * shared, 2)
        starts = torch.arange(0, rows, step, device="cuda")
        zeros = torch.zeros_like(starts)
        tiles = torch.stack([starts, (rows - starts).clamp(max=step), starts, zeros, zeros, zeros], 1)
        place = [(Place.of_rows(x), Place.of_rows(x)) for x in (k, v)]
        found.append(attend_tiles(q, *place, tiles, dim**-0.5, tile, None, 2))
    reference = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None].float() for x in (q, k, v)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert (found[0] - reference).norm() < 5e-3 * reference.norm()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dim", "width"), [(64, 64), (24, 16)])
def test_gradients_of_attention_by_flash(kernels, dim, width):
    from miles_true_on_policy.attention import attend

    trunk, lengths = 70, [9, 1, 200]
    rows, generator = trunk + sum(lengths), torch.Generator("cuda").manual_seed(0)
    shapes = ((4, dim), (2, dim), (2, width))
    qkv = [
        torch.randn(1, n, rows, d, device="cuda", generator=generator).bfloat16().requires_grad_() for n, d in shapes
    ]
    call = packed(lengths, trunk, "cuda")
    weights = torch.randn(1, rows, 4, width, device="cuda", generator=generator)
    results = []
    for function in (attend, lambda call, *rest: call.attend(*rest)):
        out = function(call, MODULE, *qkv, dim**-0.5, None)
        results.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("inner", "columns", "experts"), [(2048, 1536, 128), (768, 2048, 128), (512, 512, 8)])
def test_a_row_of_a_grouped_product_depends_on_itself_only(kernels, inner, columns, experts):
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(experts, columns, inner, device="cuda", dtype=torch.bfloat16, generator=generator)
    for rows in (1, 40, 2000, 40000):
        x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16, generator=generator)
        owner = torch.randint(experts, (rows,), device="cuda", generator=generator).sort().values
        ends = torch.bincount(owner, minlength=experts).cumsum(0).int()
        found = kernels.grouped_product(x, weight.transpose(1, 2), ends)
        for expert in owner.unique()[:3].tolist():
            mine = owner == expert
            alone = kernels.product(x[mine][None], weight[expert].t()[None])[0]
            assert torch.equal(found[mine], alone)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 128, 1024, 1536, 2560, 4096, 5120, 7168])
def test_a_norm_depends_on_its_row_only(kernels, width, dtype):
    """Alone, in a block of the columns of a matrix, and with the sum that it reads."""
    from miles_embedded.kernels.norm import rms_norm

    x, other, weight = (torch.randn(*n, width, device="cuda").to(dtype) for n in ((1, 300, 4), (1, 300, 4), ()))
    total = x + other
    whole = rms_norm(total, weight, 1e-6)
    for first, rows, heads in ((0, 300, 4), (0, 1, 1), (7, 16, 2), (3, 33, 4), (40, 257, 3)):
        piece = (slice(None), slice(first, first + rows), slice(heads))
        assert torch.equal(rms_norm(total[piece], weight, 1e-6), whole[piece])
        found = rms_norm.of_sum(x[piece], other[piece], weight, 1e-6)
        assert torch.equal(found[0], total[piece]) and torch.equal(found[1], whole[piece])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (32, 4), (128, 8), (513, 16)])
def test_a_routed_row_depends_on_itself_only(kernels, experts, k):
    """Also with given experts, as routing replay gives them in training."""
    from miles_embedded.kernels.route import choose

    x = torch.randn(300, experts, device="cuda").bfloat16()
    weights, index = choose(x, k, True)
    for first, rows in ((0, 1), (7, 3), (40, 257)):
        piece = slice(first, first + rows)
        assert all(torch.equal(a, b[piece]) for a, b in zip(choose(x[piece], k, True), (weights, index), strict=True))
    assert torch.equal(choose(x, k, True, index)[0], weights)
