"""Syncs of encoded weights from one memory: codes are written and decoded to the same places again, and equal those of a new engine."""

from __future__ import annotations

import asyncio

import pytest
import torch

from miles_core.config.load import load
from miles_core.errors import MilesError
from miles_core.precision.products import Products
from miles_core.sync.push import CopyTransport
from miles_core.sync.stream import WeightStream
from miles_embedded.engine.weights import Weights
from miles_embedded.model.load import load_model
from miles_embedded.model.storage import codes_of
from miles_embedded.model.views import export, sources
from miles_embedded.quantized.activation import encoded_views
from miles_formats import FormatCodec
from miles_formats.convert.installed import format_class, providers
from miles_fp8.format import Fp8
from miles_testing.doubles.product import SIZES, ExactExperts
from miles_testing.tiny import tiny_checkpoint


class Native(Products):
    """Products that read codes."""

    def of(self, format, model):
        return None if format is None else ExactExperts(format, torch.device("cpu"), torch.float32)


class Padded(ExactExperts):
    """Prepares scales as a copy, as products do that need padding, so that an encoder cannot write to its codes."""

    def prepare(self, parts):
        return {name: part.clone() for name, part in parts.items()}

    def restore(self, parts, shape):
        return {name: part.clone() for name, part in parts.items()}


class Copied(Native):
    def of(self, format, model):
        return None if format is None else Padded(format, torch.device("cpu"), torch.float32)


class Engine:
    """An engine in this process; counts updates that were loaded tensor by tensor."""

    def __init__(self, checkpoint, products, format):
        self.codec = FormatCodec(format)
        self.weights = Weights(load_model(checkpoint, "float32"), self.codec, products)
        self.loaded = []
        load = self.weights.load
        self.weights.load = lambda units, version, share=False: (
            self.loaded.append(version) or load(units, version, share)
        )

    def reserve(self, name, stored):
        return self.weights.inputs.reserve(name)

    async def update_weights(self, units, version):
        self.weights.update(units, version)

    def bytes(self):
        """Return everything that the products read."""
        found = {name: t for name, t in sources(self.weights.model).items() if codes_of(t) is None}
        inputs = self.weights.inputs
        for name in (*inputs.layers, *inputs.experts):
            found |= {f"{name}:{suffix}": part for suffix, part in inputs.find_codes(name).items()}
        return {name: tensor.detach().contiguous().view(torch.uint8) for name, tensor in found.items()}


class Sides:
    def __init__(self, checkpoint, products, format=None, dtype="bfloat16"):
        self.checkpoint, self.format, self.products = checkpoint, format or Fp8(), products
        self.trainer, self.engine = load_model(checkpoint, dtype), Engine(checkpoint, products, self.format)
        self.stream, self.transport, self.version = WeightStream(), CopyTransport(self.engine), -1
        self.codec = FormatCodec(self.format)
        encoded_views(self.trainer, self.codec)

    def memory(self):
        return tuple(tensor.data_ptr() for tensor in [*self.trainer.parameters(), *self.trainer.buffers()])

    def sync(self):
        self.version += 1
        stream = self.stream.encode(export(self.trainer), self.codec, self.transport, self.memory())
        asyncio.run(self.transport.send(stream, self.version))

    def train(self):
        with torch.no_grad():
            for parameter in self.trainer.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)

    def check(self):
        """Compare the engine with a new one that receives the same weights, tensor by tensor."""
        other = Engine(self.checkpoint, self.products, self.format)
        asyncio.run(CopyTransport(other).send(self.codec.encode(export(self.trainer)), 0))
        found, expected = self.engine.bytes(), other.bytes()
        assert found.keys() == expected.keys()
        assert not [name for name in found if not torch.equal(found[name], expected[name])]
        assert self.engine.weights.complete and self.engine.weights.version == self.version


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {f: tiny_checkpoint(f, directory / f, **SIZES) for f in ("qwen3_moe", "llama", "gpt_oss")}


@pytest.mark.parametrize("products", [Products, Native, Copied])
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "llama", "gpt_oss"]
)  # Llama with tied embeddings, gpt-oss with joined experts
def test_repeated_syncs_give_the_codes_and_values_of_a_new_engine(checkpoints, family, products):
    sides = Sides(checkpoints[family], products())
    for _ in range(6):
        sides.train()
        sides.sync()
        sides.check()
    assert sides.engine.loaded == [0, 1, 2]
    assert bool(sides.engine.weights.inputs.layers) == (products is not Products)


def test_a_trainer_in_float32_and_skipped_layers(checkpoints):
    sides = Sides(checkpoints["qwen3_moe"], Native(), Fp8(skip=("self_attn.k_proj", "layers.0.mlp")), "float32")
    for _ in range(5):
        sides.train()
        sides.sync()
        sides.check()
    assert sides.engine.loaded == [0, 1, 2]


@pytest.mark.parametrize("name", sorted(providers()))
def test_every_format(checkpoints, name):
    format = format_class(name).from_config(load(["--rollout-precision", name]))
    sides = Sides(checkpoints["qwen3_moe"], Products(), format)
    for _ in range(5):
        sides.train()
        sides.sync()
        sides.check()
    assert sides.engine.loaded == ([0, 1, 2, 3, 4] if format.couple else [0, 1, 2])


def test_codes_of_native_products_are_written_in_place(checkpoints):
    sides = Sides(checkpoints["qwen3_moe"], Native())
    for _ in range(4):
        sides.sync()
    inputs, last = sides.engine.weights.inputs, sides.engine.weights._last
    own = [unit for unit in last.units if unit.format]
    assert inputs.layers and inputs.experts
    assert len(own) == len(inputs.layers) + len(inputs.experts) and all(inputs.has(unit) for unit in own)
    assert not last._codes._copied and last._decode is None


CHANGES = ["sleep", "codes", "experts", "parameter", "memory", "rebuilt"]


@pytest.mark.parametrize("products", [Products, Native])
@pytest.mark.parametrize("change", CHANGES)
def test_what_moved_is_loaded(checkpoints, change, products):
    sides = Sides(checkpoints["qwen3_moe"], products())
    weights = sides.engine.weights
    for _ in range(4):
        sides.sync()
    native = bool(weights.inputs.layers)
    if change == "sleep":
        weights.release()
        weights.restore()
    elif change == "codes":
        weights.inputs.drop(list(weights.inputs.layers)[:1])
    elif change == "experts":
        weights.inputs.drop(list(weights.inputs.experts)[:1])
    elif change == "parameter":
        norm = weights.model.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
    elif change == "memory":
        norm = sides.trainer.model.norm
        norm.weight.data = norm.weight.data.clone()
    else:
        weights._codec_of = lambda precision: sides.engine.codec
        weights.rebuild("fp8")
    for _ in range(5):
        sides.train()
        sides.sync()
        sides.check()
    moved = native or change not in ("codes", "experts")
    assert (len(sides.engine.loaded) > 3) == moved and sides.engine.loaded[-1] < sides.version


@pytest.mark.parametrize("products", [Products, Native])
def test_a_sync_that_failed_leaves_an_incomplete_engine_and_the_next_one_repairs_it(checkpoints, products):
    sides = Sides(checkpoints["qwen3_moe"], products())
    for _ in range(4):
        sides.sync()
    weight = sides.trainer.model.layers[1].self_attn.q_proj.weight
    sides.train()
    with torch.no_grad():
        before = weight[0, 0].item()
        weight[0, 0] = torch.nan
    with pytest.raises(MilesError, match="q_proj"):
        sides.sync()
    assert not sides.engine.weights.complete and sides.engine.weights.version == 3
    with torch.no_grad():
        weight[0, 0] = before
    sides.sync()
    sides.check()


def test_passing_codes_are_not_kept_by_the_engine(checkpoints):
    sides = Sides(checkpoints["qwen3_moe"], Products())
    for version in range(2):
        sides.engine.weights.update(sides.codec.encode(export(sides.trainer)), version)
        assert sides.engine.weights._last is None
