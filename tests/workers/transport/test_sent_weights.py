import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_core.precision.codec import Codec
from miles_workers.transport import sent_weights
from miles_workers.transport.checksum import PIECE, checksum, checksum_of
from miles_workers.transport.sent_weights import Checksums, SentWeights


@pytest.mark.parametrize("size", [1, 255, 256, 257, PIECE // 4, PIECE // 4 + 1, PIECE // 2 + 300])
def test_a_checksum_covers_every_element_whatever_the_strides(size):
    tensor = torch.randn(size)
    found = checksum_of(tensor)
    padded = torch.zeros(-(-size * 4 // 1024) * 256)
    padded[:size] = tensor
    assert found == checksum(padded.view(torch.uint8))
    for index in (0, size // 2, size - 1):
        changed = tensor.clone()
        changed[index] += 1
        assert checksum_of(changed) != found
    assert checksum_of(torch.stack([tensor, tensor], 1)[:, 1]) == found
    assert checksum_of(torch.zeros(0)) == 0


def test_dtypes_and_shapes_count_by_their_bytes():
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.bool, torch.int64):
        values = torch.tensor([[0, 1], [1, 0]]).to(dtype)
        assert checksum_of(values) != checksum_of(torch.tensor([[1, 0], [0, 1]]).to(dtype))
        assert checksum_of(values) == checksum_of(values.view(-1))


def units(count, value=0.0):
    return [Encoded(f"w{i}", {f"w{i}": torch.full((4,), value + i)}) for i in range(count)]


def sent(dtypes):
    return SentWeights(Codec(), lambda: dtypes)


def test_values_are_compared_in_the_dtype_of_the_engine():
    found = sent({"w0": torch.bfloat16, "w1": torch.float32})
    passed = list(found.watch(iter(units(3, 1.001)), 0))
    assert [unit.name for unit in passed] == ["w0", "w1", "w2"]
    expected = Checksums()
    expected.add("w0", torch.full((4,), 1.001).bfloat16())
    expected.add("w1", torch.full((4,), 2.001))
    assert found.checksums() == expected.read()


def test_a_stream_that_is_not_read_keeps_the_checksums_of_the_staged_version():
    found = sent({"w0": torch.float32})
    list(found.watch(iter(units(1)), 1))
    before = found.checksums()
    found.watch(iter(units(1, 5.0)), 1)
    assert found.checksums() == before


@pytest.mark.parametrize("limit", ["WHOLE", "MANY"])
def test_every_tensor_of_a_large_version_is_compared_within_the_period(monkeypatch, limit):
    monkeypatch.setattr(sent_weights, limit, 30)
    names = [f"w{i}" for i in range(40)]
    found = sent(dict.fromkeys(names, torch.float32))
    list(found.watch(iter(units(40)), 0))
    assert list(found.checksums()) == names  # the first sync compares everything
    parts = []
    for version in range(2, 2 + 2 * sent_weights.PERIOD, 2):  # some policies have every other version only
        list(found.watch(iter(units(40)), version))
        parts.append(found.checksums())
        list(found.watch(iter(units(40)), version))  # a push that is repeated compares the same part
        assert found.checksums() == parts[-1]
    assert sorted(name for part in parts for name in part) == sorted(names)


def test_tensors_that_stay_are_summed_together(monkeypatch):
    launches = []

    def together(tensors):
        launches.append([tensor.numel() for tensor in tensors])
        return torch.tensor([(checksum_of(tensor) + 2**63) % 2**64 - 2**63 for tensor in tensors])

    monkeypatch.setattr(sent_weights, "runs_kernels", lambda tensor: True)
    monkeypatch.setattr(sent_weights, "checksums_of", together)
    monkeypatch.setattr(sent_weights, "checksum_of", lambda tensor: launches.append("alone") or checksum_of(tensor))
    monkeypatch.setattr(sent_weights, "_TOGETHER", 60)
    found = sent(dict.fromkeys(["w0", "w1", "w2", "w3", "w4"], torch.float32))
    stream = units(5)
    for unit in stream[1:]:
        unit.lasting = True  # the first one's memory may be used again
    list(found.watch(iter(stream), 0))
    assert launches == ["alone", [4, 4, 4, 4]]
    monkeypatch.setattr(sent_weights, "_TOGETHER", 30)
    list(found.watch(iter(stream), 0))
    assert launches[2:] == ["alone", [4, 4], [4, 4]]
    plain = sent(dict.fromkeys(found.checksums(), torch.float32))
    monkeypatch.setattr(sent_weights, "runs_kernels", lambda tensor: False)
    list(plain.watch(iter(units(5)), 0))
    assert plain.checksums() == found.checksums() and list(found.checksums()) == ["w0", "w1", "w2", "w3", "w4"]


class Doubled(Codec):
    """Encodes weights as twice their value; counts what it encodes."""

    def __init__(self):
        self.encoded = []

    def encode_unit(self, unit):
        self.encoded += unit.tensors
        return [Encoded(name, {name: 2 * tensor}, "doubled") for name, tensor in unit.tensors.items()]

    def decode(self, encoded):
        return encoded.parts[encoded.name] / 2


def repeated(count):
    sources = {f"w{i}": torch.full((4,), float(i)) for i in range(count)}
    return [Encoded(n, {n: 2 * t}, "doubled", lasting=True, source=t) for n, t in sources.items()]


def test_codes_of_a_repeated_encoding_are_checked_once_and_then_in_turn(monkeypatch):
    monkeypatch.setattr(sent_weights, "MANY", 30)
    count, period, codec = 200, sent_weights.PERIOD, Doubled()
    names, units = [f"w{i}" for i in range(count)], repeated(count)
    found = SentWeights(codec, lambda: dict.fromkeys(names, torch.float32))
    plain = [Encoded(unit.name, unit.parts, unit.format) for unit in units]
    for version in range(2):
        list(found.watch(iter(plain), version))
    assert not codec.encoded and len(found.checksums()) < count / 4
    expected = Checksums()
    for unit in units:
        expected.add(unit.name, unit.source)
    for _ in range(2):  # a push that is repeated
        codec.encoded.clear()
        list(found.watch(iter(units), 2))
        assert codec.encoded == names and found.checksums() == expected.read()
    checked, compared = [], []
    for version in range(3, 3 + period * period):
        codec.encoded.clear()
        list(found.watch(iter(units), version))
        assert set(codec.encoded) <= found.checksums().keys() and len(codec.encoded) < count / 8
        assert found.checksums().items() <= expected.read().items()
        checked += codec.encoded
        compared += found.checksums()
    assert sorted(checked) == sorted(names) and sorted(compared) == sorted(period * names)
    list(found.watch(iter(repeated(count)), 100))
    assert list(found.checksums()) == names  # another repeated encoding


def test_wrong_codes_of_a_repeated_encoding_differ_from_the_checksum_of_their_weight():
    units = repeated(3)
    units[1].parts["w1"][2] = 7
    found = SentWeights(Doubled(), lambda: dict.fromkeys(["w0", "w1", "w2"], torch.float32))
    list(found.watch(iter(units), 0))
    expected = Checksums()
    for unit in units:
        expected.add(unit.name, unit.parts[unit.name] / 2)
    assert [name for name, value in expected.read().items() if found.checksums()[name] != value] == ["w1"]
