"""Engines whose native layers store codes only: bytes, equal results, and the cases that decode the codes again."""

import asyncio

import pytest
import torch

from miles_core.contracts.engine import Request, Sampling
from miles_core.data.weight_unit import Encoded
from miles_core.precision.codec import Codec
from miles_core.precision.products import Products
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import load_model
from miles_embedded.model.storage import codes_of, mark_constant
from miles_embedded.model.views import export
from miles_embedded.quantized.activation import RoundedInputs
from miles_formats.codec import FormatCodec
from miles_fp8.format import Fp8
from miles_testing.doubles.product import SIZES, ExactExperts
from miles_testing.tiny import tiny_checkpoint

FORMAT = Fp8()
FAMILIES = ("qwen3", "qwen3_moe")


class OneWay(ExactExperts):
    """Does not convert its layout back."""

    def restore(self, parts, shape):
        return None


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {f: tiny_checkpoint(f, directory / f, **SIZES) for f in FAMILIES}


def engine_of(checkpoint, monkeypatch, product=ExactExperts, dtype="bfloat16"):
    monkeypatch.setattr(Fp8, "product", lambda self, device, kind: product(self, device, kind))
    codec = FormatCodec(Fp8())
    settings = Settings(
        str,
        codec=codec,
        codec_of=lambda p: codec if p == "fp8" else Codec(),
        products=Products("native"),
        max_context=32,
    )
    return EmbeddedEngine(load_model(checkpoint, dtype), settings)


def update(engine, trainer, codec=None, version=0):
    units = (codec or engine.codec).encode(export(trainer))
    asyncio.run(engine.update_weights(units, version))


def answer(engine):
    async def generate():
        return await engine.generate(Request([5, 6, 7], Sampling(6, temperature=0.0)))

    response = asyncio.run(generate())
    scores = asyncio.run(engine.score([[5, 6, 7, *response.tokens]]))
    return response.tokens, response.log_probs, scores[0].tolist()


def count_bytes(engine):
    """Bytes of all memory that the engine's weights use, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in engine.weight_tensors()}
    return sum(storages.values())


def quantised(engine):
    """Return the quantised parameters, whose codes the engine has."""
    layers = [layer.module.weight.numel() for layer in engine._weights.inputs.layers.values()]
    experts = dict.fromkeys(engine._weights.inputs.experts.values())
    return sum(layers) + sum(p.numel() for e in experts for p in e.module.parameters(recurse=False))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_weight_takes_one_byte_and_its_scales(checkpoints, monkeypatch, family):
    engine = engine_of(checkpoints[family], monkeypatch)
    plain = count_bytes(engine)
    update(engine, load_model(checkpoints[family], "bfloat16"))
    count = quantised(engine)
    scales = sum(t.nbytes for t in engine._weights.inputs.tensors() if t.dtype == torch.float32)
    assert count and scales < 0.001 * count
    assert count_bytes(engine) == plain - count + scales


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_bit_identical_to_those_with_decoded_weights(checkpoints, monkeypatch, family):
    found = {}
    for product in (OneWay, ExactExperts):
        engine = engine_of(checkpoints[family], monkeypatch, product)
        if product is OneWay and family == "qwen3_moe":  # experts need no layout of their own
            engine._weights.inputs = RoundedInputs(engine.model, engine.codec, engine._weights.inputs.product)
        update(engine, load_model(checkpoints[family], "bfloat16"))
        freed = [name for name, p in engine.model.named_parameters() if codes_of(p) is not None]
        assert bool(freed) == (product is ExactExperts)
        with torch.no_grad(), engine.emulated_products():
            emulated = answer(engine)
        found[product] = answer(engine), emulated
        exported = {n: t for unit in export(engine.model) for n, t in unit.tensors.items()}
        found[product] += ({n: t.clone() for n, t in exported.items()},)
    (a, b, weights), (c, d, decoded) = found[OneWay], found[ExactExperts]
    assert a == c and b == d and a != b
    assert weights.keys() == decoded.keys() and all(torch.equal(t, decoded[n]) for n, t in weights.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_update_decodes_nothing_and_keeps_addresses(checkpoints, monkeypatch, family):
    engine, trainer = engine_of(checkpoints[family], monkeypatch), load_model(checkpoints[family], "bfloat16")
    update(engine, trainer)
    before, addresses = answer(engine), [t.data_ptr() for t in engine.weight_tensors()]
    with torch.no_grad():
        for p in trainer.parameters():
            p.mul_(1.5)
    monkeypatch.setattr(Codec, "decode", lambda *a: pytest.fail("decoded"))
    update(engine, trainer, version=1)
    assert [t.data_ptr() for t in engine.weight_tensors()] == addresses
    after = answer(engine)
    assert after != before
    monkeypatch.undo()
    fresh = engine_of(checkpoints[family], monkeypatch)
    update(fresh, trainer)
    assert answer(fresh) == after


@pytest.mark.parametrize("family", FAMILIES)
def test_sleep_rebuild_and_plain_updates(checkpoints, monkeypatch, family):
    engine, trainer = engine_of(checkpoints[family], monkeypatch), load_model(checkpoints[family], "bfloat16")
    plain = count_bytes(engine)
    update(engine, trainer)
    first, small = answer(engine), count_bytes(engine)

    async def nap():
        await engine.sleep()
        return count_bytes(engine)

    async def back():
        await engine.wake()

    assert asyncio.run(nap()) < 0.01 * plain
    asyncio.run(back())
    update(engine, trainer, version=1)
    assert answer(engine) == first and count_bytes(engine) == small
    asyncio.run(engine.rebuild("bf16"))
    assert count_bytes(engine) == plain
    update(engine, trainer, Codec(), 2)
    bf16 = answer(engine)
    other = EmbeddedEngine(load_model(checkpoints[family], "bfloat16"), Settings(str, max_context=32))
    update(other, trainer, Codec())
    assert bf16 == answer(other) != first
    asyncio.run(engine.rebuild("fp8"))
    update(engine, trainer, version=3)
    assert answer(engine) == first and count_bytes(engine) == small


def test_one_plain_tensor_stores_the_values_again(checkpoints, monkeypatch):
    engine, trainer = engine_of(checkpoints["qwen3_moe"], monkeypatch), load_model(checkpoints["qwen3_moe"], "bfloat16")
    update(engine, trainer)
    inputs, module = engine._weights.inputs, engine.model.model.layers[0]
    linear, expert = "model.layers.0.self_attn.o_proj.weight", next(n for n in inputs.experts if ".0." in n)
    units = [u for u in engine.codec.encode(export(trainer)) if u.name in (linear, expert)]
    for unit in units:
        inputs.take(Encoded(unit.name, {unit.name: engine.codec.decode(unit)}))
    assert codes_of(module.self_attn.o_proj.weight) is None and codes_of(module.mlp.experts.down_proj) is None
    value = engine.codec.decode(next(u for u in units if u.name == linear)).bfloat16()
    assert torch.equal(module.self_attn.o_proj.weight, value)
    for unit in units:
        inputs.take(unit)
    assert codes_of(module.self_attn.o_proj.weight) is not None and codes_of(module.mlp.experts.down_proj) is not None


def test_a_backward_pass_and_an_empty_batch_read_decoded_values(checkpoints, monkeypatch):
    engine = engine_of(checkpoints["qwen3_moe"], monkeypatch, dtype="float32")
    update(engine, load_model(checkpoints["qwen3_moe"], "float32"))
    layer = engine.model.model.layers[0]
    linear, x = layer.self_attn.o_proj, torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    wide = torch.cat([x] * (linear.in_features // 128), 1)
    assert linear(wide[:0]).shape == (0, linear.out_features)
    wide.requires_grad_()
    linear(wide).sum().backward()
    weight = codes_of(linear.weight).values()
    torch.testing.assert_close(wide.grad, weight.sum(0).expand_as(wide))
    assert "weight" not in linear.__dict__
    x.requires_grad_()
    layer.mlp(x[None])[0].sum().backward()
    assert x.grad.isfinite().all() and x.grad.any() and "down_proj" not in layer.mlp.experts.__dict__


def test_a_freed_weight_without_codes_cannot_be_read(checkpoints, monkeypatch):
    engine = engine_of(checkpoints["qwen3"], monkeypatch)
    update(engine, load_model(checkpoints["qwen3"], "bfloat16"))
    engine._weights.inputs.drop_all()
    with pytest.raises(RuntimeError, match="neither values nor codes"):
        codes_of(engine.model.model.layers[0].mlp.up_proj.weight).values()


def test_constant_weights_and_trainers_keep_their_values(checkpoints):
    model, codec = load_model(checkpoints["qwen3"], "bfloat16"), FormatCodec(FORMAT)
    mark_constant(model.model.layers[0].parameters())
    native = ExactExperts(FORMAT, torch.device("cpu"), torch.bfloat16)
    engine, trainer = RoundedInputs(model, codec, native, codes_only=True), load_model(checkpoints["qwen3"], "bfloat16")
    for _ in engine.take_each(codec.encode(export(trainer))):
        pass
    layers = model.model.layers
    assert all(codes_of(p) is None for p in layers[0].parameters())
    assert codes_of(layers[1].mlp.up_proj.weight) is not None
    engine.remove()
    assert torch.equal(
        layers[1].mlp.up_proj.weight,
        FORMAT.dequantize(FORMAT.quantize(trainer.model.layers[1].mlp.up_proj.weight)).bfloat16(),
    )
    other = RoundedInputs(model, codec, native)
    for _ in other.take_each(codec.encode(export(trainer))):
        pass
    assert all(codes_of(p) is None for p in model.parameters())
