"""Buckets: what lies in them, what their checksum finds, and what the receiver makes of them."""

from __future__ import annotations

import pytest
import torch

from miles_core.data.weight_unit import Encoded, WeightUnit
from miles_core.errors import SyncError
from miles_core.precision.format import Stored
from miles_formats.codec import FormatCodec
from miles_formats.convert.installed import format_class, providers
from miles_formats.selector import Selector
from miles_workers.transport.arrivals import Inbox
from miles_workers.transport.bucket import Bucket, room_of, unpack
from miles_workers.transport.checksum import BLOCK, checksum


def plain(name, *shape, dtype=torch.bfloat16):
    return Encoded(name, {name: torch.randn(shape).to(dtype)})


def same(a, b):
    return (a.name, a.format, a.parts.keys()) == (b.name, b.format, b.parts.keys()) and all(
        a.parts[n].dtype == b.parts[n].dtype and torch.equal(a.parts[n].float(), b.parts[n].float()) for n in a.parts
    )


def test_tensors_come_out_as_they_went_in_whatever_their_layout():
    codes = Encoded(
        "q.weight",
        {"q.weight": torch.randn(6, 8).to(torch.float8_e4m3fn), "q.weight_scale_inv": torch.ones(1, 1)},
        "fp8",
    )
    turned = Encoded("t.weight", {"t.weight": torch.randn(8, 6).t()})
    units = [plain("a.weight", 3, 5), codes, turned, plain("scalar", dtype=torch.float32), plain("empty", 0, 4)]
    bucket = Bucket(torch.zeros(8 * BLOCK, dtype=torch.uint8))
    assert all(map(bucket.add, units))
    found = list(unpack(bucket.header(), bucket.filled.clone()))
    assert len(found) == 5 and all(map(same, found, units))
    assert bucket.end == sum(map(room_of, units)) and len(bucket.filled) % BLOCK == 0
    # one that lasts begins at the same place of a cache's line, where products round alike
    apart = torch.randn(64)[2:]
    lasting = Encoded("last", {"last": apart[(40 - apart.data_ptr()) % 64 // 4 :][:32]}, lasting=True)
    end = bucket.end
    assert bucket.add(lasting) and bucket.end == end + room_of(lasting)
    (*_, there) = unpack(bucket.header(), bucket.filled)
    assert same(there, lasting) and (there.parts["last"].data_ptr() - bucket.buffer.data_ptr()) % 64 == 40
    # a bucket is filled again
    bucket.clear()
    assert bucket.add(units[1]) and [u.name for u in unpack(bucket.header(), bucket.filled)] == ["q.weight"]


def test_codes_are_written_where_they_are_sent_from():
    bucket = Bucket(torch.zeros(4 * BLOCK, dtype=torch.uint8))
    stored = {"q.weight": Stored("weight", torch.uint8, (4, 8)), "q.scale": Stored("scale", torch.float32, (1,))}
    room = bucket.reserve("q.weight", stored)
    room["q.weight"].fill_(7)
    room["q.scale"].fill_(0.5)
    end = bucket.end
    assert bucket.add(Encoded("q.weight", room, "mine")) and bucket.end == end  # found there, not copied
    (found,) = unpack(bucket.header(), bucket.filled)
    assert found.parts["q.weight"].unique().tolist() == [7] and found.parts["q.scale"].tolist() == [0.5]
    assert bucket.reserve("big", {"big": Stored("big", torch.uint8, (4 * BLOCK,))}) is None
    other = Encoded("q.weight", {"q.weight": torch.zeros(4, 8, dtype=torch.uint8), "q.scale": torch.ones(1)}, "mine")
    bucket.clear()
    bucket.reserve("q.weight", stored)
    assert bucket.add(other)  # codes that came from elsewhere are copied
    assert next(unpack(bucket.header(), bucket.filled)).parts["q.scale"].tolist() == [1.0]


def test_what_does_not_fit_is_left_out_whole():
    bucket = Bucket(torch.zeros(BLOCK, dtype=torch.uint8))
    assert bucket.add(plain("a", 200)) and not bucket.add(plain("b", 400))
    assert [name for name, *_ in bucket.header()["units"]] == ["a"]


@pytest.mark.parametrize("at", [0, 1000, 5 * BLOCK - 1])
def test_a_checksum_finds_a_bit_anywhere(at):
    flat = torch.randint(0, 256, (5 * BLOCK,), dtype=torch.uint8)
    before = checksum(flat)
    flat[at] ^= 16
    assert checksum(flat) != before


def test_a_checksum_finds_blocks_in_another_order_and_is_defined_for_nothing():
    flat = torch.randint(0, 256, (2 * BLOCK,), dtype=torch.uint8)
    assert checksum(flat) != checksum(flat.roll(BLOCK)) and checksum(flat[:0]) == 0


def test_memory_stays_attached_while_it_is_used(tmp_path):
    bucket, inbox = Bucket(torch.zeros(BLOCK, dtype=torch.uint8)), Inbox()
    file = tmp_path / "memory"

    def message(name):
        bucket.clear()
        bucket.add(plain(name, 8))
        file.write_bytes(bucket.filled.numpy().tobytes())
        return {**bucket.header(), "memory": {"kind": "file", "key": str(file), "path": str(file)}}

    assert [unit.name for unit in inbox.open(message("a"))] == ["a"]
    inbox.finish()
    said = message("b")
    file.unlink()  # mapped still
    assert [unit.name for unit in inbox.open(said)] == ["b"]
    for _ in range(3):
        inbox.finish()  # the second update in a row that did not use it
    with pytest.raises(SyncError, match=r"engine.s process cannot open .* different hosts"):
        list(inbox.open(said))
    with pytest.raises(SyncError, match="memory of the kind 'pigeon', which this engine does not support"):
        list(inbox.open({**said, "memory": {"kind": "pigeon"}}))


def test_a_bucket_that_came_in_part_is_refused():
    bucket = Bucket(torch.zeros(2 * BLOCK, dtype=torch.uint8))
    bucket.add(plain("a", 600))
    with pytest.raises(SyncError, match="2048 bytes of weights arrived as 1024 bytes"):
        list(unpack(bucket.header(), bucket.filled[:BLOCK]))


def test_a_checksum_is_of_pieces_as_of_the_whole():
    flat = torch.randint(0, 256, (5 * BLOCK,), dtype=torch.uint8)
    assert checksum(flat[:BLOCK], flat[BLOCK:]) == checksum(flat)


@pytest.mark.parametrize("name", sorted(providers()))
def test_every_format_writes_its_codes_into_the_bucket(name):
    codec = FormatCodec(format_class(name)(), Selector())
    weights = {
        f"model.layers.0.mlp.{part}.weight": torch.randn(256, 128).bfloat16() for part in ("gate_proj", "up_proj")
    }
    bucket = Bucket(torch.zeros(256 * BLOCK, dtype=torch.uint8))
    expected = list(codec.encode([WeightUnit(dict(weights))]))
    sent = list(codec.encode([WeightUnit(dict(weights))], bucket.reserve))
    assert all(unit.format == name and bucket.add(unit) for unit in sent)
    assert all(map(same, unpack(bucket.header(), bucket.filled), expected))


def test_a_large_tensor_is_added_up_as_it_is_copied_and_read():
    bucket = Bucket(torch.zeros(4 << 20, dtype=torch.uint8))
    units = [plain("a", 1200, 1000), plain("b", 100, 3), plain("turned", 900, 300)]
    units[2].parts["turned"] = units[2].parts["turned"].t()
    assert all(map(bucket.add, units))
    header = bucket.header()
    assert header["checksum"] == checksum(bucket.filled)
    assert all(map(same, unpack(header, bucket.filled), units))
    bucket.buffer[2_500_000] ^= 1
    with pytest.raises(SyncError, match="starts with a arrived with checksum"):
        list(unpack(header, bucket.filled))
