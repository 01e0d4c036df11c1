"""Weights that a format encodes together on a GPU: in which groups, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch

from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import MilesError
from miles_core.precision.format import Format, Stored, store
from miles_formats import codec as module
from miles_formats.codec import FormatCodec
from miles_workers.transport.bucket import Bucket


class OnAGpu(torch.Tensor):
    """Says that it lies there."""

    is_cuda = True


class Halves(Format):
    """Halves of weights, and what is not finite."""

    name, tile, error, shows, together = "halves", (1, 1), 1.0, "bad", 4

    def __init__(self):
        self.groups = []

    def storage(self, shape):
        return Stored("weight", torch.bfloat16, shape), Stored("bad", torch.float32, (1,))

    def quantize(self, weight, stats=None, out=None):
        weight = weight.as_subclass(torch.Tensor)
        return store({"weight": weight / 2, "bad": weight.float().sum().view(1)}, out)

    def quantize_all(self, weights, outs):
        self.groups.append(len(weights))
        return super().quantize_all(weights, outs)

    def dequantize(self, parts):
        return parts["weight"].float() * 2

    def config(self, unquantized):
        return {}


def units(count, lasting=True, norm=None):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        name = f"model.layers.{i}.mlp.up_proj.weight"
        yield WeightUnit({name: torch.randn(8, 64, generator=generator).bfloat16().as_subclass(OnAGpu)}, lasting)
        if i == norm:
            yield WeightUnit({"model.norm.weight": torch.ones(64).bfloat16()}, lasting)


def bytes_of(encoded):
    return [(e.name, {k: t.as_subclass(torch.Tensor).clone() for k, t in e.parts.items()}) for e in encoded]


def assert_the_same(found, expected):
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (_, parts), (_, known) in zip(found, expected, strict=True):
        assert parts.keys() == known.keys() and all(torch.equal(parts[k], known[k]) for k in known)


@pytest.fixture
def expected():
    one_by_one = Halves()
    one_by_one.together = 1
    return bytes_of(FormatCodec(one_by_one).encode(units(10, norm=5)))


def test_groups_end_at_the_limit_and_at_what_is_not_encoded(expected):
    format = Halves()
    assert_the_same(bytes_of(FormatCodec(format).encode(units(10, norm=5))), expected)
    assert format.groups == [4, 2, 4]


def test_units_of_two_weights_and_other_dtypes(expected):
    format, pairs = Halves(), []
    stream = list(units(10))
    for first, second in zip(stream[::2], stream[1::2], strict=True):
        pairs.append(WeightUnit(first.tensors | second.tensors, lasting=True))
    wide = WeightUnit({name: tensor.float() for name, tensor in pairs.pop().tensors.items()}, lasting=True)
    found = bytes_of(FormatCodec(format).encode([*pairs, wide]))
    assert_the_same(found, [one for one in expected if "norm" not in one[0]])
    assert format.groups == [4, 4]  # a weight in float32 is rounded first, alone


def test_what_does_not_last_is_encoded_with_its_unit(expected):
    format = Halves()
    assert_the_same(bytes_of(FormatCodec(format).encode(units(10, lasting=False, norm=5))), expected)
    assert format.groups == [1] * 10


def test_without_room_new_memory_is_limited(expected, monkeypatch):
    monkeypatch.setattr(module, "_ANEW", 2 * 8 * 64 * 2)
    format = Halves()
    assert_the_same(bytes_of(FormatCodec(format).encode(units(10, norm=5))), expected)
    assert format.groups == [2, 2, 2, 2, 2]


def test_a_group_ends_where_its_room_does(expected):
    """In a bucket for three weights and the norm: what has no room is encoded alone, and copied into the next bucket."""
    format, found = Halves(), []
    bucket = Bucket(torch.zeros(7 * 1024, dtype=torch.uint8))
    for encoded in FormatCodec(format).encode(units(10, norm=5), bucket.reserve):
        if not bucket.add(encoded):
            assert not bucket.awaits
            bucket.clear()
            assert bucket.add(encoded)
        found += bytes_of([encoded])
    assert_the_same(found, expected)
    assert format.groups == [3, 1, 2, 1, 2, 1] and not bucket.awaits


def test_a_caller_without_memory_of_its_own_does_not_end_a_group(expected, monkeypatch):
    format = Halves()
    room = {}

    def reserve(name, stored):
        if ".2." not in name:
            return {}
        room.update({part: torch.empty(s.shape, dtype=s.dtype) for part, s in stored.items()})
        return room

    encoded = list(FormatCodec(format).encode(units(10, norm=5), reserve))
    assert_the_same(bytes_of(encoded), expected)
    assert format.groups == [4, 2, 4]
    assert all(encoded[2].parts[part] is tensor for part, tensor in room.items())


@pytest.mark.parametrize("bad", [0, 2, 5])
def test_the_one_that_is_not_finite_is_named(bad):
    stream = list(units(6))
    next(iter(stream[bad].tensors.values()))[3, 7] = torch.nan
    with pytest.raises(MilesError, match=rf"model.layers.{bad}.mlp.up_proj.weight holds 1 values .* at \[3, 7\]"):
        list(FormatCodec(Halves()).encode(stream))
