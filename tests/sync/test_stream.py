"""Which weights are sent again as the same objects, and that they always have the current values."""

from __future__ import annotations

import pytest
import torch

from miles_core.contracts.transport import Transport
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import MilesError
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format, Stored, store
from miles_core.sync import stream as module
from miles_core.sync.stream import WeightStream
from miles_formats.codec import FormatCodec


class Halves(Format):
    """A format that implements the encoding of single weights only."""

    name, tile, error, shows = "halves", (1, 1), 1.0, "bad"

    def storage(self, shape):
        return Stored("weight", torch.bfloat16, shape), Stored("bad", torch.float32, (1,))

    def quantize(self, weight, stats=None, out=None):
        return store({"weight": weight.bfloat16() / 2, "bad": weight.float().sum().view(1)}, out)

    def dequantize(self, parts):
        return parts["weight"].float() * 2

    def config(self, unquantized):
        return {}


class Coupled(Halves):
    couple = (("gate_proj", "up_proj"),)


class Memory(Transport):
    """Reserves memory for some weights, and reads all units."""

    repeats = True

    def __init__(self, reserves=("up_proj",)):
        self.reserves, self.rooms, self.names = reserves, {}, []

    def reserve(self, name, stored):
        self.names.append(name)
        if not any(part in name for part in self.reserves):
            return {}
        if name not in self.rooms:
            self.rooms[name] = {part: torch.empty(s.shape, dtype=s.dtype) for part, s in stored.items()}
        return self.rooms[name]

    async def send(self, units, version):
        raise NotImplementedError


class Trainer:
    def __init__(self, dtype=torch.bfloat16, lasting=True):
        self.lasting, self.read = lasting, 0
        names = [f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(3) for part in ("gate", "up", "down")]
        self.weights = {name: torch.randn(8, 64, dtype=dtype) for name in names}
        self.weights["model.norm.weight"] = torch.randn(64, dtype=dtype)

    def units(self):
        self.read += 1
        names = list(self.weights)
        for pair in (names[:2], names[2:3], names[3:5], names[5:6], names[6:8], names[8:9], names[9:]):
            yield WeightUnit({name: self.weights[name] for name in pair}, self.lasting)

    def train(self):
        for tensor in self.weights.values():
            tensor.add_(torch.randn(tensor.shape))


def sync(stream, trainer, codec, transport, memory="here"):
    """Train and sync; check that every tensor has its current value, and return the sent objects."""
    trainer.train()
    sent = []
    for each in stream.encode(trainer.units(), codec, transport, memory):
        expected = FormatCodec(Halves()).encode_unit(WeightUnit({each.name: trainer.weights[each.name]}))[0].parts
        if codec.format is None:
            expected = {each.name: trainer.weights[each.name]}
        assert each.parts.keys() == expected.keys()
        assert all(torch.equal(part, expected[name]) for name, part in each.parts.items())
        sent.append(each)
    assert [each.name for each in sent] == list(trainer.weights)
    return sent


def same(first, second):
    return all(a is b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reserves", [(), ("up_proj",), ("proj",)])
def test_codes_are_written_again_to_the_same_tensors(dtype, reserves):
    stream, trainer, codec, transport = WeightStream(), Trainer(dtype), FormatCodec(Halves()), Memory(reserves)
    first, second = (sync(stream, trainer, codec, transport) for _ in range(2))
    assert not same(first, second) and trainer.read == 2
    calls = len(transport.names)
    for _ in range(3):
        again = sync(stream, trainer, codec, transport)
        assert same(second, again) and all(each.lasting for each in again)
        assert all(each.source is not None or not each.format for each in again)
    assert trainer.read == 2 and len(transport.names) - calls <= 3
    assert all(each.parts[part] is room for each in again for part, room in transport.rooms.get(each.name, {}).items())


def test_plain_tensors_are_sent_again_from_the_second_sync_on():
    stream, trainer, transport = WeightStream(), Trainer(), Memory()
    transport.repeats = False
    codec = Codec()
    assert same(sync(stream, trainer, codec, transport), sync(stream, trainer, codec, transport))


CHANGES = ["memory", "unknown", "codec", "transport", "room", "cleared"]


@pytest.mark.parametrize("change", CHANGES)
def test_other_memory_is_encoded_again(change):
    stream, trainer, codec, transport = WeightStream(), Trainer(), FormatCodec(Halves()), Memory()
    sent = [sync(stream, trainer, codec, transport) for _ in range(3)][-1]
    memory = {"memory": "there", "unknown": None}.get(change, "here")
    if change == "memory":
        trainer.weights = {name: tensor.clone() for name, tensor in trainer.weights.items()}
    elif change == "codec":
        codec = FormatCodec(Halves())
    elif change == "transport":
        transport = Memory()
    elif change == "room":
        transport.rooms.clear()
    elif change == "cleared":
        stream.clear()
    for _ in range(3):
        again = sync(stream, trainer, codec, transport, memory)
        assert not any(a is b for a, b in zip(sent, again, strict=True) if a.format)
        for name, room in transport.rooms.items():
            assert all(each.parts[part] is t for each in again if each.name == name for part, t in room.items())
    assert same(again, sync(stream, trainer, codec, transport, memory)) == (memory is not None)


@pytest.mark.parametrize("why", ["transport", "passing", "too large", "coupled", "codec"])
def test_what_cannot_be_repeated_is_encoded_each_time(why, monkeypatch):
    trainer, transport = Trainer(lasting=why != "passing"), Memory(() if why == "too large" else ("proj",))
    codec = FormatCodec(Coupled() if why == "coupled" else Halves())
    if why == "transport":
        transport.repeats = False
    elif why == "too large":
        monkeypatch.setattr(module, "KEPT", 8 * 1028)
    elif why == "codec":
        codec = type("Other", (FormatCodec,), {})(Halves())
    stream = WeightStream()
    sent = [sync(stream, trainer, codec, transport) for _ in range(4)]
    assert trainer.read == 4 and not any(a is b for a, b in zip(sent[-2], sent[-1], strict=True))
    if why == "too large":
        monkeypatch.setattr(module, "KEPT", 9 * 1028)
        stream = WeightStream()
        assert same(*[sync(stream, trainer, codec, transport) for _ in range(3)][1:])


def test_a_stream_that_broke_off_is_not_kept():
    stream, trainer, codec, transport = WeightStream(), Trainer(), FormatCodec(Halves()), Memory()
    sync(stream, trainer, codec, transport)
    next(iter(stream.encode(trainer.units(), codec, transport, "here")))
    second, third = (sync(stream, trainer, codec, transport) for _ in range(2))
    assert not same(second, third)
    repeated = stream.encode(trainer.units(), codec, transport, "here")
    next(repeated)
    repeated.close()
    fourth = sync(stream, trainer, codec, transport)
    assert same(fourth, sync(stream, trainer, codec, transport))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_repeated_encoding_names_a_weight_that_is_not_finite(dtype):
    stream, trainer, codec, transport = WeightStream(), Trainer(dtype), FormatCodec(Halves()), Memory()
    for _ in range(3):
        sync(stream, trainer, codec, transport)
    weight = trainer.weights["model.layers.1.mlp.up_proj.weight"]
    value = weight[3, 7].item()
    weight[3, 7] = torch.nan
    with pytest.raises(MilesError, match=r"layers.1.mlp.up_proj.weight holds 1 values .* at \[3, 7\]"):
        list(stream.encode(trainer.units(), codec, transport, "here"))
    weight[3, 7] = value
    sync(stream, trainer, codec, transport)
