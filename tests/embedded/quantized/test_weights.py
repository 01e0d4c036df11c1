import copy

import pytest
import torch

from miles_core.contracts.trainer import Context
from miles_core.errors import MilesError
from miles_core.precision.format import Format, Stored, store
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.engine.attention import PromptCall
from miles_embedded.model.gradient_sum import GRADIENT_SUM
from miles_embedded.model.load import load_model
from miles_embedded.model.parts import decoder_layers
from miles_embedded.model.views import Loader, export
from miles_embedded.quantized.weights import install
from miles_embedded.trainer.optimizer import Optimizer
from miles_formats.codec import FormatCodec
from miles_testing.tiny import FAMILIES, tiny_checkpoint

#: gpt-oss joins the experts of a layer in one tensor; test_joined_experts_same_bytes has it.
QUANTISED = [family for family in FAMILIES if family != "gpt_oss"]


class Rows(Format):
    """int8 with one scale a row and a count of the weights it quantised."""

    name = "rows"
    tile = (1, 1 << 30)
    error = 0.02

    def __init__(self, skip=()):
        self.skip, self.calls = skip, 0

    def storage(self, shape):
        return Stored("weight", torch.int8, shape), Stored("weight_scale", torch.float32, (shape[0], 1))

    def quantize(self, weight, stats=None, out=None):
        self.calls += 1
        scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 7
        return store({"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale}, out)

    def dequantize(self, parts):
        return parts["weight"].float() * parts["weight_scale"]

    def config(self, unquantized):
        return {"quant_method": "rows", "ignore": unquantized}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {family: tiny_checkpoint(family, directory / family) for family in QUANTISED}


def run(model):
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
    call = PromptCall(Context("train", (0, 1), torch.arange(9)), [9])
    backbone = model.model(input_ids=tokens, position_ids=torch.arange(9)[None], use_cache=False, call=call)
    return model.lm_head(backbone.last_hidden_state)


def synced(model, codec):
    """An engine's model after a weight sync, as FP32 or BF16 like the trainer's."""
    engine = copy.deepcopy(model)
    loader = Loader(engine)
    for encoded in codec.encode(export(model)):
        loader.put(encoded.name, codec.decode(encoded))
    assert not loader.missing()
    return engine


@pytest.mark.parametrize("family", QUANTISED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_trainer_computes_what_the_engine_computes(checkpoints, family, dtype):
    model = load_model(checkpoints[family], dtype)
    engine, plain = synced(model, FormatCodec(Rows())), run(model)
    quantizer = install(model, FormatCodec(Rows()))
    assert torch.equal(run(model), run(engine))
    assert not torch.equal(run(model), plain)
    engines = dict(engine.named_parameters())
    for source in quantizer.sources:
        assert torch.equal(quantizer.value(source), engines[source]), source


def test_experts_are_quantised_apart_and_gate_apart_from_up(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    quantizer = install(model, FormatCodec(Rows(skip=("up_proj", "*.experts.2.*"))))
    source = "model.layers.0.mlp.experts.gate_up_proj"
    plain, value = quantizer.parameter(source), quantizer.value(source)
    half = plain.shape[1] // 2
    changed = (plain != value).flatten(2).any(2)
    assert changed[[0, 1, 3], :half].all() and not changed[:, half:].any() and not changed[2].any()


def test_everybody_outside_of_a_forward_sees_the_plain_parameters(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    names = [n for n, _ in model.named_parameters()]
    install(model, FormatCodec(Rows()))
    run(model).sum().backward()
    assert [n for n, _ in model.named_parameters()] == names
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    linear = model.model.layers[0].self_attn.q_proj
    assert linear.weight is dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"]


def test_the_backward_pass_is_straight_through(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    engine = synced(model, FormatCodec(Rows()))
    install(model, FormatCodec(Rows()))
    run(model).square().mean().backward()
    run(engine).square().mean().backward()
    expected = dict(engine.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name


def test_several_backward_passes_use_the_graph_of_one_value(checkpoints):
    model = load_model(checkpoints["llama"], "float32")
    quantizer = install(model, FormatCodec(Rows()))
    layer = model.model.layers[0].self_attn.q_proj
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(module.weight))
    outputs = [run(model).sum(), run(model).sum()]
    for output in outputs:
        output.backward()
    twice = layer.weight.grad.clone()
    assert seen[0] is seen[1] and seen[0].grad_fn is not None
    layer.weight.grad = None
    run(model).sum().backward()
    assert torch.allclose(layer.weight.grad * 2, twice)
    layer.weight = torch.nn.Parameter(layer.weight.data)  # the same values in the same memory
    run(model).sum().backward()
    assert torch.allclose(layer.weight.grad * 2, twice)
    quantizer.drop(quantizer.sources[0])
    run(model)
    assert seen[-1] is not seen[-2]


def test_kernels_add_the_gradient_of_a_value_to_the_sum_of_its_parameter(checkpoints):
    model = load_model(checkpoints["qwen3"], "bfloat16")
    quantizer = install(model, FormatCodec(Rows()))
    source = next(s for s in quantizer.sources if "mlp" in s)
    parameter = quantizer.parameter(source)
    value = quantizer.differentiable(source, parameter)
    assert getattr(value, GRADIENT_SUM, None) is None
    optimizer = Optimizer(model, OptimizerConfig(lr=0.1))
    value = quantizer.differentiable(source, parameter)
    assert getattr(value, GRADIENT_SUM).master is optimizer.masters[source]

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.new_ones(())

        @staticmethod
        def backward(ctx, grad):
            return None

    Summed.apply(value).backward()
    assert parameter.grad is None and optimizer.masters[source].grad is None


def test_recomputed_activations_see_the_same_weights(checkpoints):
    gradients = []
    for recompute in (False, True):
        model = load_model(checkpoints["qwen3_moe"], "float32")
        install(model, FormatCodec(Rows()))
        if recompute:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            for layer in decoder_layers(model):
                layer.training = True
        run(model).square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(torch.equal(g, gradients[1][n]) for n, g in gradients[0].items())


@pytest.mark.parametrize("fused", [False, True])
def test_a_weight_is_quantised_once_an_optimiser_step(checkpoints, fused):
    model, format = load_model(checkpoints["qwen3_moe"], "float32"), Rows()
    install(model, FormatCodec(format))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    outputs, calls = [], []
    for _ in range(2):
        for _ in range(3):
            outputs.append(run(model))
            outputs[-1].square().mean().backward()
        calls.append(format.calls)
        optimizer.step()
        optimizer.zero_grad()
    assert calls[1] == 2 * calls[0]
    assert torch.equal(outputs[0], outputs[2]) and not torch.equal(outputs[2], outputs[3])
    assert torch.equal(run(model), run(synced(model, FormatCodec(Rows()))))


def test_all_weights_are_quantised_at_once_after_a_step(checkpoints, monkeypatch):
    model, encode, calls = load_model(checkpoints["qwen3_moe"]), FormatCodec.encode, []

    def count(self, units, room=None):
        calls.append(self)
        return encode(self, units, room)

    monkeypatch.setattr(FormatCodec, "encode", count)
    quantizer = install(model, FormatCodec(Rows()))
    unused = quantizer.sources[-1]
    run(model)
    groups = len({id(group) for group in quantizer._groups.values()})
    assert len(calls) == groups  # the first pass quantises what it uses, when it uses it
    quantizer.drop(unused)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    first = quantizer.sources[0]
    quantizer.value(first)
    assert len(calls) == groups + 1 and unused not in quantizer._values
    run(model)
    assert len(calls) == groups + 2
    fresh = install(copy.deepcopy(model), FormatCodec(Rows()))
    assert all(torch.equal(quantizer.value(s), fresh.value(s)) for s in quantizer.sources)
    assert len(calls) == 2 * groups + 2
    monkeypatch.setattr("miles_embedded.quantized.weights._TOGETHER", 0)
    quantizer.forget()
    run(model)
    assert len(calls) == 3 * groups + 2


def test_loading_weights_is_noticed(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    install(model, FormatCodec(Rows()))
    before = run(model)
    loader = Loader(model)
    for unit in export(copy.deepcopy(model)):
        for name, tensor in unit.tensors.items():
            loader.put(name, tensor * 1.5 if "q_proj" in name else tensor)
    assert not torch.equal(run(model), before)


def test_writing_through_data_needs_forget(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    quantizer = install(model, FormatCodec(Rows()))
    run(model)
    source = "model.layers.0.self_attn.q_proj.weight"
    quantizer.parameter(source).data.mul_(2)
    stale = quantizer.value(source).clone()
    quantizer.forget()
    assert torch.equal(quantizer.value(source), 2 * stale)


def test_a_copy_of_the_model_quantises_its_own_weights(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    install(model, FormatCodec(Rows()))
    before = run(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_proj.weight.mul_(2)
    assert not torch.equal(run(twin), before) and torch.equal(run(model), before)


def test_without_gradient_nothing_is_recorded(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    install(model, FormatCodec(Rows()))
    with torch.no_grad():
        assert not run(model).requires_grad
    model.requires_grad_(False)
    assert not run(model).requires_grad


def test_a_weight_that_went_wrong_stops_the_forward_by_name(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    install(model, FormatCodec(Rows()))
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[2, 0, 0] = float("nan")
    with pytest.raises(MilesError, match=r"layers\.1\.mlp\.experts\.2\.down_proj\.weight holds 1 values"):
        run(model)
    assert "weight" not in model.model.layers[1].self_attn.q_proj.__dict__


class Stacked(Rows):
    """The same, several weights at a time."""

    name = "stacked"
    shows = "weight_scale"

    def __init__(self, supported=True):
        super().__init__()
        self.supported, self.stacks = supported, []

    def fake_quantize_stacked(self, weights, out):
        if not self.supported:
            return None
        self.stacks.append(len(weights))
        parts = [Rows.quantize(Rows(), weight) for weight in weights]
        for part, each in zip(parts, out, strict=True):
            each.copy_(self.dequantize(part))
        return torch.stack([part["weight_scale"] for part in parts])


@pytest.mark.parametrize("family", ["qwen3_moe", "llama"])
def test_weights_that_are_stored_together_are_quantised_together(checkpoints, family):
    format, single = Stacked(), Stacked(supported=False)
    found, expected = (install(load_model(checkpoints[family], "bfloat16"), FormatCodec(f)) for f in (format, single))
    for source in expected.sources:
        assert torch.equal(found.value(source), expected.value(source)), source
    assert not format.calls and single.calls >= len(format.stacks) > 0
    experts = next((p for n, p in found.model.named_parameters() if n.endswith("gate_up_proj")), None)
    assert max(format.stacks) == (1 if experts is None else 2 * len(experts))  # gates and ups alternate


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_the_model_copy_is_quantised_together(checkpoints, dtype):
    format = Stacked()
    quantizer = install(load_model(checkpoints["llama"], dtype), FormatCodec(format))
    quantizer.value(quantizer.sources[0])
    assert bool(format.stacks) is (dtype == "bfloat16")


def test_a_bad_weight_among_those_quantised_together_is_named(checkpoints):
    quantizer = install(load_model(checkpoints["qwen3_moe"], "bfloat16"), FormatCodec(Stacked()))
    source = next(s for s in quantizer.sources if s.endswith("down_proj"))
    with torch.no_grad():
        quantizer.parameter(source)[1, 2, 3] = torch.inf
    with pytest.raises(MilesError, match=r"experts\.1\.down_proj\.weight holds 1 values that are NaN or Inf"):
        quantizer.value(source)
