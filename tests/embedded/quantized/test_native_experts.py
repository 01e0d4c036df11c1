"""Native products of several layers at once: layers that read one input, and experts. A double computes them on a CPU."""

from weakref import ref

import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_embedded.model.load import load_model
from miles_embedded.model.load_units import load_units
from miles_embedded.model.views import export, views
from miles_embedded.quantized.activation import RoundedInputs
from miles_embedded.quantized.weights import install
from miles_formats import FormatCodec
from miles_fp8.format import Fp8
from miles_fp8.layout import CODES
from miles_testing.doubles.product import SIZES, ExactExperts
from miles_testing.tiny import tiny_checkpoint

FORMAT = Fp8()


class Wide(ExactExperts):
    """The results of experts are doubled, so that they differ from emulated ones."""

    factor = 2.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {f: tiny_checkpoint(f, directory / f, **SIZES) for f in ("qwen3_moe", "qwen3")}


def wide():
    return Wide(FORMAT, torch.device("cpu"), torch.float32)


def loaded(model, product):
    codec = FormatCodec(FORMAT)
    inputs = RoundedInputs(model, codec, product)
    load_units(model, inputs.take_each(codec.encode(export(model))), codec.decode)
    return inputs


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_layers_that_read_one_input_are_one_product(checkpoints):
    model = load_model(checkpoints["qwen3"], "float32")
    product = wide()
    inputs = loaded(model, product)
    attention, x = model.model.layers[0].self_attn, normal(1, 5, 128)
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    with inputs.emulate():
        expected = [layer(x) for layer in layers]
    product.calls.clear()
    found = [layer(x) for layer in layers]
    assert product.calls == [(5, sum(len(layer.weight) for layer in layers), 128)]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    product.calls.clear()
    torch.testing.assert_close(layers[1](x), expected[1])  # alone
    other = x.clone()
    layers[0](x)
    torch.testing.assert_close(layers[1](other), expected[1])  # another tensor
    assert [n for _, n, _ in product.calls] == [len(layers[1].weight), sum(len(e.weight) for e in layers), 128]


@torch.no_grad()
def test_joint_codes_follow_updates_and_are_freed(checkpoints):
    model = load_model(checkpoints["qwen3"], "float32")
    product = wide()
    inputs = loaded(model, product)
    mlp, x = model.model.layers[0].mlp, normal(1, 3, 128)
    before = [mlp.gate_proj(x), mlp.up_proj(x)]
    name = "model.layers.0.mlp.up_proj"
    parts = FORMAT.quantize(2 * mlp.up_proj.weight)
    address = inputs.layers[f"{name}.weight"].codes[CODES].data_ptr()
    inputs.take(Encoded(f"{name}.weight", {f"{name}.{k}": t for k, t in parts.items()}, "fp8"))
    after = [mlp.gate_proj(x), mlp.up_proj(x)]
    assert torch.equal(after[0], before[0]) and inputs.layers[f"{name}.weight"].codes[CODES].data_ptr() == address
    torch.testing.assert_close(after[1], 2 * before[1])
    inputs.take(Encoded(f"{name}.weight", {f"{name}.weight": mlp.up_proj.weight}))  # plain: the other one stays native
    product.calls.clear()
    torch.testing.assert_close([mlp.gate_proj(x), mlp.up_proj(x)], before)
    assert product.calls == [(3, 256, 128)]
    assert sum(t.nbytes for t in inputs.tensors()) > 0
    inputs.drop_all()
    assert not list(inputs.tensors())
    torch.testing.assert_close(mlp.gate_proj(x), before[0])


def test_experts_multiply_codes_once_all_came(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    product = wide()
    inputs = loaded(model, product)
    block, x = model.model.layers[0].mlp, normal(1, 6, 128)
    with torch.no_grad():
        with inputs.emulate():
            expected = block(x)
        assert not product.experts_calls
        torch.testing.assert_close(block(x), 2 * expected)
        assert product.experts_calls == 1
        name = next(name for name in inputs.experts if name.endswith("experts.1.up_proj.weight"))
        weight = FORMAT.dequantize(inputs.experts[name].format.quantize(normal(128, 128, seed=3)))
        inputs.take(Encoded(name, {name: weight}))  # plain
        torch.testing.assert_close(block(x), expected)
        parts = FORMAT.quantize(weight)
        inputs.take(Encoded(name, {f"{name.removesuffix('.weight')}.{k}": t for k, t in parts.items()}, "fp8"))
        of_name = {view.name: view for view in views(model)}
        of_name[name].of(block.experts.gate_up_proj).copy_(weight)
        with inputs.emulate():
            changed = block(x)
        assert not torch.allclose(changed, expected)
        torch.testing.assert_close(block(x), 2 * changed, rtol=1e-4, atol=1e-4)
        inputs.drop_all()
        torch.testing.assert_close(block(x), changed)


def test_the_gradients_of_experts_are_those_of_the_emulation(checkpoints):
    native, plain = (load_model(checkpoints["qwen3_moe"], "float32") for _ in range(2))
    product = wide()
    install(native, FormatCodec(FORMAT), product)
    install(plain, FormatCodec(FORMAT))
    found = []
    for model in (native, plain):
        block, x = model.model.layers[1].mlp, normal(1, 6, 128).requires_grad_()
        y = block(x)
        y.backward(normal(1, 6, 128, seed=2))
        experts = block.experts
        found.append((y, x.grad, experts.gate_up_proj.grad, experts.down_proj.grad, block.gate.weight.grad))
    assert product.experts_calls == 1
    torch.testing.assert_close(found[0][0], 2 * found[1][0])
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(ours, theirs)


@torch.no_grad()
def test_an_encoder_in_the_same_process_writes_the_codes_of_experts_in_place(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    inputs, codec = loaded(model, wide()), FormatCodec(FORMAT)
    experts = next(iter(inputs.experts.values()))
    expected = {name: {key: part.clone() for key, part in parts.items()} for name, parts in experts.codes.items()}
    for parts in experts.codes.values():
        for part in parts.values():
            part.view(torch.uint8).zero_()
    written = 0
    for encoded in codec.encode(
        export(load_model(checkpoints["qwen3_moe"], "float32")), lambda name, _: inputs.reserve(name)
    ):
        if encoded.name in experts.names:
            with torch.profiler.profile() as profiler:
                inputs.take(encoded)
            assert "aten::copy_" not in {event.name for event in profiler.events()}
            written += 1
    assert written == len(experts.names)
    for name, parts in experts.codes.items():
        assert all(
            torch.equal(part.view(torch.uint8), expected[name][key].view(torch.uint8)) for key, part in parts.items()
        )
    found = [ref(part) for name in experts.names for part in inputs.find_codes(name).values()]
    assert all(each() is not None for each in found)
    del encoded
    inputs.drop_all()
    assert all(each() is None for each in found)  # the memory is free
    assert not inputs.reserve("model.norm.weight")
