"""Linear layers with a native product, computed by a double that a CPU can run."""

import pytest
import torch
from torch import nn

from miles_core.contracts.engine import Request, Sampling
from miles_core.data.weight_unit import Encoded
from miles_core.precision.codec import Codec
from miles_core.precision.product import Product
from miles_core.precision.products import Products
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_embedded.model.load_units import load_units
from miles_embedded.model.views import export
from miles_embedded.quantized.activation import RoundedInputs
from miles_embedded.quantized.linear import linear_shapes
from miles_embedded.quantized.weights import install
from miles_formats import FormatCodec
from miles_fp8.format import Fp8
from miles_fp8.layout import CODES, SCALES
from miles_testing.doubles.product import ExactProduct
from miles_testing.tiny import tiny_checkpoint

SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32}
FORMAT = Fp8()


class Doubling(Product):
    """Twice the emulated product, so that results show which of the two ran."""

    def prepare(self, parts):
        return {CODES: parts[CODES].t(), SCALES: parts[SCALES]}

    def __call__(self, x, weight, bias=None):
        value = FORMAT.dequantize({**weight, CODES: weight[CODES].t()}).to(x.dtype)
        y = 2 * (FORMAT.fake_quantize_activation(x) @ value.T)
        return y if bias is None else y + bias


class Transposing(Doubling):
    """Multiplies gradients, too."""

    def transpose(self, parts):
        return self.prepare({name: tensor.t() for name, tensor in parts.items()})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {f: tiny_checkpoint(f, directory / f, **SIZES) for f in ("qwen3_moe", "qwen3")}


@pytest.fixture
def model(checkpoints):
    return load_model(checkpoints["qwen3"], "float32")


def doubling():
    return Doubling(torch.device("cpu"), torch.float32)


def exact():
    return ExactProduct(FORMAT, torch.device("cpu"), torch.float32)


def x_for(layer, rows=5):
    return torch.randn(2, rows, layer.in_features, generator=torch.Generator().manual_seed(0))


def loaded(model, product):
    """The model as an engine that took one update."""
    codec = FormatCodec(FORMAT)
    inputs = RoundedInputs(model, codec, product)
    load_units(model, inputs.take_each(codec.encode(export(model))), codec.decode)
    return inputs


def emulated(layer, x):
    return nn.functional.linear(FORMAT.fake_quantize_activation(x), layer.weight, layer.bias)


def test_a_linear_layer_multiplies_codes_once_they_came(model):
    layer = model.model.layers[0].mlp.down_proj
    RoundedInputs(model, FormatCodec(FORMAT), doubling())
    x = x_for(layer)
    assert torch.equal(layer(x), emulated(layer, x))  # no codes yet
    model = load_model(model.name_or_path, "float32")
    layer = model.model.layers[0].mlp.down_proj
    own = layer.__dict__.get("forward")
    inputs = loaded(model, doubling())
    torch.testing.assert_close(layer(x), 2 * emulated(layer, x))
    assert torch.equal(layer(x[:0]), emulated(layer, x[:0])) and layer(x.double().to(torch.float32)[0]).ndim == 2
    with inputs.emulate():
        assert torch.equal(layer(x), emulated(layer, x))
    inputs.enabled = False
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))
    inputs.enabled = True
    inputs.remove()
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight)) and layer.__dict__.get("forward") == own


def test_which_layers_are_native(checkpoints):
    model = load_model(checkpoints["qwen3_moe"], "float32")
    inputs = loaded(model, exact())
    names = set(inputs.layers)
    assert "model.layers.0.self_attn.q_proj.weight" in names and len(names) == 2 * 4
    assert not any("experts" in name or "gate" in name or "lm_head" in name for name in names)

    class Narrow(ExactProduct):
        def takes(self, shape):
            return shape[0] == 64

    narrow = RoundedInputs(
        load_model(checkpoints["qwen3_moe"]), FormatCodec(FORMAT), Narrow(FORMAT, torch.device("cpu"), torch.float32)
    )
    assert {name.rpartition("self_attn.")[2] for name in narrow.layers} == {"k_proj.weight", "v_proj.weight"}


def test_the_shapes_that_are_probed_are_those_below_the_head(model):
    assert set(linear_shapes(model)) == {(128, 128), (64, 128), (256, 128), (128, 256)}
    model.lm_head = nn.Linear(128, 77)
    assert (77, 128) not in linear_shapes(model)


def test_the_backward_pass_is_that_of_the_emulated_product(model):
    native, plain = load_model(model.name_or_path, "float32"), model
    install(native, FormatCodec(FORMAT), doubling())
    install(plain, FormatCodec(FORMAT))
    grads = []
    for one in (native, plain):
        layer = one.model.layers[1].self_attn.o_proj
        layer.bias = nn.Parameter(torch.ones(layer.out_features))
        x = x_for(layer).requires_grad_()
        y = layer(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        grads.append((y.detach() - 1, layer.weight.grad, layer.bias.grad, x.grad))
    (y, *ours), (y_plain, *theirs) = grads
    torch.testing.assert_close(y, 2 * y_plain)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("product", [None, Doubling, Transposing])
def test_quantised_gradients_reach_the_input_of_a_layer_but_not_its_weight(model, product):
    plain = load_model(model.name_or_path, "float32")
    made = product and product(torch.device("cpu"), torch.float32)
    install(model, FormatCodec(FORMAT), made, rounds_gradients=True)
    install(plain, FormatCodec(FORMAT))
    ours, theirs = (m.model.layers[1].mlp.down_proj for m in (model, plain))
    for layer in (ours, theirs):
        layer.bias = nn.Parameter(torch.ones(layer.out_features))
    x, x_plain = (x_for(ours).requires_grad_() for _ in range(2))
    y = ours(x)
    gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(gradient)
    theirs(x_plain).backward(gradient)
    weight = FORMAT.dequantize(FORMAT.quantize(ours.weight.detach().bfloat16()))
    expected = FORMAT.fake_quantize_activation(gradient) @ weight
    torch.testing.assert_close(x.grad, 2 * expected if product is Transposing else expected)
    assert not torch.allclose(x.grad, x_plain.grad, rtol=1e-3)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)


def test_gradients_are_not_quantised_while_the_model_computes_with_plain_weights(model):
    quantizer = install(model, FormatCodec(FORMAT), rounds_gradients=True)
    quantizer.enabled = False
    layer = model.model.layers[1].mlp.down_proj
    x = x_for(layer).requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2, 5, layer.out_features) @ layer.weight)


def test_layers_with_one_input_quantise_it_once_in_training(model, monkeypatch):
    kept = []

    class Keeping(ExactProduct):
        def joins(self, shapes):
            return True

        def keep_rows(self, x, uses):
            kept.append((tuple(x.shape), uses))

    install(model, FormatCodec(FORMAT), Keeping(FORMAT, torch.device("cpu"), torch.float32))
    block = model.model.layers[0].mlp
    block(x_for(block.gate_proj))
    assert kept == [((10, 128), 2)]
    with torch.no_grad():
        block(x_for(block.gate_proj))
    assert len(kept) == 1  # the layers share a product


def test_frozen_weights_get_no_gradient(model):
    install(model.requires_grad_(False), FormatCodec(FORMAT), exact())
    layer = model.model.layers[0].mlp.up_proj
    x = x_for(layer).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None and layer.weight.grad is None


def test_new_weights_are_new_codes_on_the_trainers_side(model):
    install(model, FormatCodec(FORMAT), exact())
    layer = model.model.layers[0].mlp.up_proj
    x, optimizer = x_for(layer), torch.optim.SGD([layer.weight], lr=0.5)
    before = layer(x)
    before.square().mean().backward()
    optimizer.step()
    after = layer(x)
    value = FORMAT.dequantize(FORMAT.quantize(layer.weight.detach().bfloat16()))
    torch.testing.assert_close(after, FORMAT.fake_quantize_activation(x) @ value.T)
    assert not torch.equal(before, after)


def test_codes_are_copied_and_a_plain_tensor_takes_them_away(model):
    inputs = loaded(model, doubling())
    name, layer = "model.layers.0.mlp.up_proj.weight", model.model.layers[0].mlp.up_proj
    x, parts = x_for(layer), FORMAT.quantize(layer.weight.detach())
    encoded = Encoded(name, {f"model.layers.0.mlp.up_proj.{k}": t for k, t in parts.items()}, "fp8")
    inputs.take(encoded)
    held, before = inputs.layers[name].codes[CODES].data_ptr(), layer(x)
    parts[SCALES].zero_()  # the transport's buffer is used again
    assert torch.equal(layer(x), before)
    inputs.take(encoded)
    assert not layer(x).any() and inputs.layers[name].codes[CODES].data_ptr() == held
    inputs.take(Encoded(name, {name: layer.weight.detach()}))
    assert torch.equal(layer(x), emulated(layer, x))


def test_the_engine_takes_codes_with_an_update_and_switches_with_its_precision(checkpoints, monkeypatch):
    import asyncio

    made = []

    def product(self, device, dtype):
        made.append(ExactProduct(self, device, dtype))
        return made[-1]

    monkeypatch.setattr(Fp8, "product", product)
    codec = FormatCodec(Fp8())
    settings = Settings(
        str,
        codec=codec,
        codec_of=lambda p: codec if p == "fp8" else Codec(),
        products=Products("native"),
        max_context=32,
    )
    trainer = load_model(checkpoints["qwen3"], "float32")
    engine = EmbeddedEngine(load_model(checkpoints["qwen3"], "float32"), settings)

    async def answer(codec):
        await engine.update_weights(codec.encode(export(trainer)), 0)
        return await engine.generate(Request([5, 6, 7], Sampling(4, temperature=0.0)))

    first = asyncio.run(answer(codec))
    assert made[0].calls and engine.native_products
    with engine.emulated_products():
        calls = len(made[0].calls)
        again = asyncio.run(answer(codec))
        assert len(made[0].calls) == calls
    assert first.tokens == again.tokens
    torch.testing.assert_close(torch.tensor(first.log_probs), torch.tensor(again.log_probs), rtol=0, atol=1e-4)
    asyncio.run(engine.rebuild("bf16"))
    assert not engine.native_products
    calls = sum(len(p.calls) for p in made)
    asyncio.run(answer(Codec()))
    assert sum(len(p.calls) for p in made) == calls
    quantizer = engine.quantizer(codec.format)
    assert isinstance(quantizer.product, ExactProduct) and (256, 128) in quantizer.shapes


def test_a_unified_run_multiplies_codes_on_both_sides(toy_run, monkeypatch):
    made = []

    def product(self, device, dtype):
        made.append(ExactProduct(self, device, dtype))
        return made[-1]

    monkeypatch.setattr(Fp8, "product", product)
    monkeypatch.setattr(Products, "from_config", lambda config: Products("native"))  # the plan knows of no GPU here
    run = toy_run(rollout_fp8=True, train_fp8=True, emulate_precision=True, device="cpu", steps=2)
    gaps = [step["mismatch/abs_log_prob"] for step in run.metrics if "mismatch/abs_log_prob" in step]
    assert gaps and max(gaps) < 1e-4
    assert sum(bool(p.calls) for p in made) >= 4  # engine, trainer, and the probes of both
