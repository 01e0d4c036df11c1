import copy

import pytest
import torch

from miles_core.contracts.trainer import Context
from miles_core.errors import ConfigError
from miles_core.precision.format import Format, Stored, store
from miles_embedded.engine.attention import PromptCall
from miles_embedded.model.load import load_model
from miles_embedded.quantized.activation import RoundedInputs
from miles_embedded.quantized.weights import install
from miles_formats.codec import FormatCodec
from miles_testing.tiny import FAMILIES, tiny_checkpoint

#: gpt-oss joins the experts of a layer in one tensor; test_joined_experts_same_bytes has it.
QUANTISED = [family for family in FAMILIES if family != "gpt_oss"]


class Coarse(Format):
    """Weights and activations as multiples of 1/8: simple enough to compute by hand."""

    name = "coarse"
    tile = (1, 1)
    error = 1.0

    def __init__(self, skip=()):
        self.skip = skip

    def storage(self, shape):
        return (Stored("weight", torch.int16, shape),)

    def quantize(self, weight, stats=None, out=None):
        return store({"weight": (weight.float() * 8).round().to(torch.int16)}, out)

    def dequantize(self, parts):
        return parts["weight"].float() / 8

    def fake_quantize_activation(self, x):
        return ((x.float() * 8).round() / 8).to(x.dtype)

    def config(self, unquantized):
        return {"quant_method": "coarse", "ignore": unquantized}


class WeightsOnly(Coarse):
    fake_quantize_activation = Format.fake_quantize_activation


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {family: tiny_checkpoint(family, directory / family) for family in QUANTISED}


def run(model):
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
    call = PromptCall(Context("train", (0, 1), torch.arange(9)), [9])
    backbone = model.model(input_ids=tokens, position_ids=torch.arange(9)[None], use_cache=False, call=call)
    return model.lm_head(backbone.last_hidden_state)


def rounded(x):
    return (x * 8).round() / 8


def experts_by_hand(experts, hidden, index, weights, gate_up_of, down_of):
    """Every token through its experts, one at a time; ``gate_up_of(expert)`` says whether its input is rounded."""
    out = torch.zeros_like(hidden)
    for row in range(len(hidden)):
        for choice in range(index.shape[1]):
            e = int(index[row, choice])
            x = rounded(hidden[row]) if gate_up_of(e) else hidden[row]
            gate, up = (experts.gate_up_proj[e] @ x).chunk(2)
            h = torch.nn.functional.silu(gate) * up
            h = rounded(h) if down_of(e) else h
            out[row] += weights[row, choice] * (experts.down_proj[e] @ h)
    return out


def test_a_format_of_weights_only_touches_no_input(checkpoints):
    assert Coarse().quantizes_activations and not WeightsOnly().quantizes_activations
    model = load_model(checkpoints["qwen3_moe"], "float32")
    before = run(model)
    RoundedInputs(model, FormatCodec(WeightsOnly()))
    assert torch.equal(run(model), before)


def test_a_linear_layer_reads_its_input_rounded_and_passes_the_gradient_on(checkpoints):
    model = load_model(checkpoints["llama"], "float32")
    layer = model.model.layers[0].mlp.down_proj
    inputs = RoundedInputs(model, FormatCodec(Coarse()))
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = layer(x)
    assert torch.equal(out, torch.nn.functional.linear(rounded(x), layer.weight))
    out.sum().backward()
    assert torch.allclose(x.grad, layer.weight.sum(0).expand_as(x))
    torch.testing.assert_close(layer.weight.grad, rounded(x).sum(0).expand_as(layer.weight))
    head = torch.randn(2, model.lm_head.in_features)
    assert torch.equal(model.lm_head(head), torch.nn.functional.linear(head, model.lm_head.weight))
    inputs.remove()
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))


@pytest.mark.parametrize(
    ("skip", "gate_up_of", "down_of"),
    [
        ((), lambda e: True, lambda e: True),
        (("*.experts.2.*",), lambda e: e != 2, lambda e: e != 2),
        (("*.experts.*.down_proj.*",), lambda e: True, lambda e: False),
        (("*.experts.1.gate_proj.*", "*.experts.1.up_proj.*"), lambda e: e != 1, lambda e: True),
    ],
)
def test_experts_read_both_inputs_rounded_where_their_weights_are_quantised(checkpoints, skip, gate_up_of, down_of):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    experts = model.model.layers[0].mlp.experts
    RoundedInputs(model, FormatCodec(Coarse(skip)))
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [2, 1], [0, 2]])
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(2))
    expected = experts_by_hand(experts, hidden, index, weights, gate_up_of, down_of)
    torch.testing.assert_close(experts(hidden, index, weights), expected)


def test_the_gradient_passes_straight_through_the_experts(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    experts = model.model.layers[0].mlp.experts
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    coarse = rounded(hidden).requires_grad_()  # rounding changes nothing in front of gate and up here
    fine = coarse.detach().clone().requires_grad_()
    index, weights = (
        torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]]),
        torch.rand(4, 2, generator=torch.Generator().manual_seed(2)),
    )
    experts(fine, index, weights).square().sum().backward()
    expected = experts.gate_up_proj.grad.clone()
    experts.zero_grad()
    RoundedInputs(model, FormatCodec(Coarse(("*.down_proj.*",))))
    experts(coarse, index, weights).square().sum().backward()
    torch.testing.assert_close(coarse.grad, fine.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(experts.gate_up_proj.grad, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("family", QUANTISED)
def test_engine_and_trainer_compute_the_same(checkpoints, family):
    from miles_embedded.model.load_units import load_units
    from miles_embedded.model.views import export

    trainer, codec = load_model(checkpoints[family], "float32"), FormatCodec(Coarse())
    engine = copy.deepcopy(trainer)
    plain = run(trainer)
    quantizer = install(trainer, codec)
    load_units(engine, codec.encode(export(trainer)), codec.decode)
    without = run(engine)
    RoundedInputs(engine, codec)
    assert torch.equal(run(engine), run(trainer))
    assert not torch.equal(run(engine), without)
    quantizer.enabled = False
    assert torch.equal(run(trainer), plain)
    quantizer.enabled = True
    assert torch.equal(run(engine), run(trainer))


def test_a_recomputation_sees_the_same_rounding(checkpoints):
    from miles_embedded.trainer.recomputation import recompute_layers

    plain, recomputed = (load_model(checkpoints["qwen3_moe"], "float32") for _ in range(2))
    for model in (plain, recomputed):
        install(model, FormatCodec(Coarse()))
    recompute_layers(recomputed)
    for model in (plain, recomputed):
        run(model).square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_a_tokens_result_does_not_depend_on_its_neighbours(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    experts = model.model.layers[0].mlp.experts
    RoundedInputs(model, FormatCodec(Coarse()))
    random = torch.Generator().manual_seed(3)
    hidden, weights = torch.randn(40, 32, generator=random), torch.rand(40, 2, generator=random)
    index = torch.stack([torch.randperm(4, generator=random)[:2] for _ in range(40)])
    together = experts(hidden, index, weights)
    alone = torch.cat([experts(hidden[i : i + 1], index[i : i + 1], weights[i : i + 1]) for i in range(40)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)


def test_gate_without_up_is_refused(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    with pytest.raises(ConfigError, match=r"experts\.0\.up_proj\.weight is quantised and .*gate_proj.* common input"):
        RoundedInputs(model, FormatCodec(Coarse(("*.experts.0.gate_proj.*",))))
