"""Sums of memory: on a CPU, and in one pass with copies, by the kernel of a GPU and the rules that choose it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_workers.transport import checksum as module
from miles_workers.transport import checksum_native
from miles_workers.transport.bucket import Bucket, unpack
from miles_workers.transport.checksum import BLOCK, CpuSum, KernelSum, Sum, checksum, make_read_sum, make_sum


def noise(blocks):
    return torch.randint(0, 256, (blocks * BLOCK,), dtype=torch.uint8)


def split_mix(number):
    """SplitMix64's finaliser in Python's integers."""
    x = (number + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def reference(flat):
    """The definition at the head of the module, in Python's integers."""
    total = 0
    for block, words in enumerate(flat.view(torch.int32).view(-1, 256).tolist()):
        found = sum(word * ((split_mix(place) >> 33) % 2**31 | 1) for place, word in enumerate(words))
        total += found * (split_mix(256 + block) | 1)
    return total % 2**64


class Jobs:
    """Test double of the GPU kernel: records its launches and computes them with torch."""

    def __init__(self, memory):
        self.memory, self.launches = memory, []

    def run(self, jobs, total, block):
        self.launches.append(jobs)
        for source, to, first, blocks, number in jobs:
            piece = self.at(source, blocks * block)
            if to:
                self.at(to, blocks * block).copy_(piece)
            sums = (piece.view(torch.int32).view(-1, block // 4) * module.MULTIPLIERS.long()).sum(1)
            total[number] += (sums * (module.pseudo_random(256 + torch.arange(first, first + blocks)) | 1)).sum()

    def at(self, address, nbytes):
        for flat in self.memory:
            start = address - flat.data_ptr()
            if start >= 0 and start + nbytes <= len(flat):
                return flat[start : start + nbytes]
        raise AssertionError("no memory of ours")


@pytest.fixture
def jobs(monkeypatch):
    """``KernelSum`` on memory of this host: (source, to), and what the kernel was asked."""
    source, to = noise(40), torch.zeros(40 * BLOCK, dtype=torch.uint8)
    kernel = Jobs([source, to])
    monkeypatch.setitem(sys.modules, "miles_workers.transport.checksum_kernel", kernel)
    monkeypatch.setattr("miles_workers.transport.checksum_kernel", kernel, raising=False)
    monkeypatch.setattr(module, "runs_kernels", lambda flat: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return source, to, kernel


@pytest.fixture(params=["native", "torch"])
def implementation(request, monkeypatch):
    """Both ways to add up a CPU's memory; the kernels of GPUs are compared with them below."""
    if request.param == "torch":
        monkeypatch.setattr(checksum_native, "available", lambda: False)
    elif why := checksum_native.NATIVE.why_not():
        pytest.skip(why)


@pytest.mark.parametrize("blocks", [1, 5, 33])
def test_the_checksum_is_as_defined(implementation, blocks):
    for flat in (noise(blocks), torch.full((blocks * BLOCK,), 255, dtype=torch.uint8), torch.zeros(BLOCK).byte()):
        assert (
            checksum(flat)
            == reference(flat)
            == checksum(flat[: len(flat) // 2048 * BLOCK], flat[len(flat) // 2048 * BLOCK :])
        )


def test_multipliers_tell_all_places_apart():
    found = module.MULTIPLIERS.tolist()
    assert len(set(found)) == len(found) == 256 and all(0 < m < 2**31 and m % 2 for m in found)
    assert module.MULTIPLIERS.dtype == torch.int32


def flipped(flat, *bits):
    """A copy with these bits, counted from the first byte on, flipped."""
    out = flat.clone()
    for bit in bits:
        out[bit // 8] ^= 1 << bit % 8
    return out


def test_every_single_bit_is_found(implementation):
    for source in (noise(40), torch.zeros(40 * BLOCK, dtype=torch.uint8)):
        right, generator = checksum(source), torch.Generator().manual_seed(3)
        bits = torch.randint(0, 8 * len(source), (2000,), generator=generator).tolist()
        assert sum(checksum(flipped(source, bit)) != right for bit in bits) == 2000


def test_two_flipped_top_bits_are_found(implementation):
    source = noise(3)
    right, tops = checksum(source), [32 * word + 31 for word in range(3 * 256)]
    generator = torch.Generator().manual_seed(4)
    pairs = torch.randint(0, len(tops), (2000, 2), generator=generator).tolist()
    pairs += [(0, word) for word in range(1, 256)] + [(1, word) for word in range(3, len(tops), 2)]  # 32 and 64 bits
    for a, b in pairs:
        assert a == b or checksum(flipped(source, tops[a], tops[b])) != right


def test_no_pair_of_top_bits_in_a_block_cancels():
    """All pairs and signs at once: changes of 2^31 times m - n and m + n, for any two multipliers."""
    m = [int(x) for x in module.MULTIPLIERS]
    for i, one in enumerate(m):
        assert all(2**31 * (one - other) % 2**64 and 2**31 * (one + other) % 2**64 for other in m[:i])


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_reversed_and_exchanged_words_are_found(implementation, width):
    source = noise(4)
    words = source.view(-1, width)
    assert checksum(words.flip(0).reshape(-1)) != checksum(source)
    for block in range(4):
        part = slice(block * BLOCK // width, (block + 1) * BLOCK // width)
        turned = words.clone()
        turned[part] = words[part].flip(0)
        assert checksum(turned.view(-1)) != checksum(source)
    for step in (1, 2, 8, 16, 100):
        exchanged = words.clone()
        exchanged[0], exchanged[step] = words[step], words[0]
        assert checksum(exchanged.view(-1)) != checksum(source)


@pytest.mark.parametrize("every", [1, 2, 3, 4, 8, 256])
@pytest.mark.parametrize("first", [0, 1, 3])
def test_negated_values_are_found(implementation, every, first):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values = torch.randn(8 * BLOCK, generator=torch.Generator().manual_seed(5)).to(dtype)
        changed = values.clone()
        changed[first::every] = -changed[first::every]
        assert checksum(changed.view(torch.uint8)) != checksum(values.view(torch.uint8))


def test_blocks_in_other_places_are_found(implementation):
    a, b = noise(1), noise(1)
    source = torch.cat([a, b, b, a, noise(4)])
    right, blocks = checksum(source), source.view(-1, BLOCK)
    for order in (
        [1, 0, 2, 3],
        [1, 0, 3, 2],
        [0, 1, 3, 2],
        [3, 1, 0, 2],
    ):  # the second changes no plain average of places
        moved = torch.cat([blocks[order], blocks[4:]])
        assert checksum(moved.view(-1)) != right
    assert checksum(blocks.roll(1, 0).reshape(-1)) != right


@given(st.data())
@settings(max_examples=200)
def test_any_few_changed_words_are_found(data):
    source = torch.randint(-(2**31), 2**31, (3 * 256,), dtype=torch.int32, generator=torch.Generator().manual_seed(6))
    places = data.draw(st.sets(st.integers(0, len(source) - 1), min_size=1, max_size=4))
    changed = source.clone()
    for place in places:
        changed[place] ^= data.draw(st.integers(-(2**31), 2**31 - 1).filter(bool))
    assert checksum(changed.view(torch.uint8)) != checksum(source.view(torch.uint8))


def test_what_is_copied_is_added_up_in_the_same_launch_and_the_rest_beside_it(jobs):
    source, to, kernel = jobs
    found = make_sum(source)
    assert isinstance(found, KernelSum)
    for at, blocks in ((20, 8), (4, 6), (10, 1)):
        part = slice(at * BLOCK, (at + blocks) * BLOCK)
        found.copy(to[part].view(2, -1), source[part].view(2, -1), at * BLOCK, stays=True)
    found.copy(to[: BLOCK + 8], source[: BLOCK + 8], 0, stays=True)  # not in whole blocks: at once
    assert not kernel.launches and torch.equal(to[: BLOCK + 8], source[: BLOCK + 8]) and not to[4 * BLOCK]
    assert found.of(30 * BLOCK) == reference(source[: 30 * BLOCK])
    (launch,) = kernel.launches
    assert sorted((first, blocks, to != 0) for _, to, first, blocks, _ in launch) == [
        (0, 4, False), (4, 6, True), (10, 1, True), (11, 9, False), (20, 8, True), (28, 2, False)
    ]  # fmt: skip
    assert torch.equal(to[20 * BLOCK : 28 * BLOCK], source[20 * BLOCK : 28 * BLOCK]) and not to[12 * BLOCK :][:99].any()
    found.copy(to[:BLOCK], source[29 * BLOCK : 30 * BLOCK], 29 * BLOCK, stays=True)  # too late to wait
    assert torch.equal(to[:BLOCK], source[29 * BLOCK : 30 * BLOCK]) and len(kernel.launches) == 1


def test_pieces_count_as_one_and_each_may_be_copied(jobs):
    source, to, kernel = jobs
    pieces = source[: 3 * BLOCK], source[8 * BLOCK : 9 * BLOCK], source[16 * BLOCK : 20 * BLOCK]
    whole = reference(torch.cat(pieces))
    found = make_sum(*pieces)
    found.copy(to[:BLOCK], pieces[1], 3 * BLOCK, stays=True)
    assert found.of(8 * BLOCK) == whole == checksum(*pieces)
    assert torch.equal(to[:BLOCK], pieces[1]) and len(kernel.launches) == 2
    assert Sum(*pieces).of(8 * BLOCK) == whole and checksum(source[:0]) == 0


def test_what_is_there_is_added_up_while_more_is_found(jobs, monkeypatch):
    source, to, kernel = jobs
    monkeypatch.setattr(module, "FIRST_LAUNCH", 8 * BLOCK)
    monkeypatch.setattr(module, "LAUNCH", 10 * BLOCK)
    found = make_sum(source[: 8 * BLOCK])
    found.up_to(8 * BLOCK)
    for piece in range(1, 5):
        found.append(source[piece * 8 * BLOCK : (piece + 1) * 8 * BLOCK])
        if piece == 2:
            found.copy(to[: 8 * BLOCK], source[16 * BLOCK : 24 * BLOCK], 16 * BLOCK, stays=True)
        found.up_to((piece + 1) * 8 * BLOCK)
    assert [sum(blocks for *_, blocks, _ in launch) for launch in kernel.launches] == [8, 16, 16]
    assert torch.equal(to[: 8 * BLOCK], source[16 * BLOCK : 24 * BLOCK])
    assert found.of(40 * BLOCK) == reference(source) and len(kernel.launches) == 3


def test_what_is_read_is_added_up_in_launches_that_grow(jobs, monkeypatch):
    source, _, kernel = jobs
    monkeypatch.setattr(module, "FIRST_LAUNCH", 4 * BLOCK)
    monkeypatch.setattr(module, "LAUNCH", 8 * BLOCK)
    found = make_read_sum(source)
    for start in range(0, 36, 3):
        found.read(source[start * BLOCK : (start + 3) * BLOCK].view(torch.int32).view(4, -1))
    assert isinstance(found, KernelSum) and [len(launch) for launch in kernel.launches] == [2, 3, 3, 3]
    assert found.of(36 * BLOCK) == reference(source[: 36 * BLOCK]) and len(kernel.launches) == 5


def test_a_tensor_that_the_receiver_put_elsewhere_is_copied_from_there(jobs):
    _, to, kernel = jobs
    memory = noise(60)
    kernel.memory.append(memory)
    bucket = Bucket(memory[20 * BLOCK : 30 * BLOCK])
    bucket.end, bucket.units = 10 * BLOCK, [["a", "", [["a", "uint8", [8 * BLOCK], 0]]]]
    for unit in unpack(bucket.header(), bucket.buffer):
        for start in (0, 40 * BLOCK):
            moved = memory[start : start + 8 * BLOCK]
            unit.copy(to[: 8 * BLOCK], moved)
            assert torch.equal(to[: 8 * BLOCK], moved)


def test_a_source_that_may_change_is_copied_at_once(jobs, monkeypatch):
    source, to, kernel = jobs
    found = make_sum(to)
    monkeypatch.setattr(module, "PIECE", 2 * BLOCK)
    found.copy(to[: 4 * BLOCK], source[: 4 * BLOCK], 0)
    found.copy(to[4 * BLOCK : 5 * BLOCK], source[4 * BLOCK : 5 * BLOCK], 4 * BLOCK)  # small: not worth a launch
    assert len(kernel.launches) == 1 and torch.equal(to[: 5 * BLOCK], source[: 5 * BLOCK])
    source.zero_()
    assert found.of(40 * BLOCK) == reference(to)


def test_other_dtypes_and_layouts_are_copied_as_torch_does(jobs):
    source, to, kernel = jobs
    found = make_sum(source)
    numbers, turned = source[: 8 * BLOCK].view(torch.int16), source[8 * BLOCK : 16 * BLOCK].view(64, 128).t()
    found.copy(to.view(torch.int32)[: 4 * BLOCK], numbers, 0, stays=True)
    found.copy(to[16 * BLOCK : 24 * BLOCK].view(128, 64), turned, 8 * BLOCK, stays=True)
    found.copy(to[25 * BLOCK + 4 : 26 * BLOCK + 4], source[16 * BLOCK : 17 * BLOCK], 16 * BLOCK, stays=True)
    assert not kernel.launches and torch.equal(to.view(torch.int32)[: 4 * BLOCK], numbers.int())
    assert torch.equal(to[16 * BLOCK : 24 * BLOCK].view(128, 64), turned)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shift", [0, 8, 32])
def test_a_compiled_pass_copies_and_adds_up(monkeypatch, threads, shift):
    if why := checksum_native.NATIVE.why_not():
        pytest.skip(why)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    memory = torch.zeros(41 * BLOCK, dtype=torch.uint8)
    start = shift - memory.data_ptr() % 64 + 64
    source, to, sums = noise(40), memory[start : start + 40 * BLOCK], torch.zeros(40, dtype=torch.int64)
    checksum_native.add_blocks(source.data_ptr(), to.data_ptr(), sums.data_ptr(), module.MULTIPLIERS.data_ptr(), 40)
    assert torch.equal(to, source) and not memory[:start].any() and not memory[start + 40 * BLOCK :].any()
    expected = (source.view(torch.int32).view(40, -1) * module.MULTIPLIERS.long()).sum(1)
    assert torch.equal(sums, expected)
    sums.zero_()
    checksum_native.add_blocks(source.data_ptr(), 0, sums.data_ptr(), module.MULTIPLIERS.data_ptr(), 40)
    assert torch.equal(sums, expected)


@pytest.mark.parametrize("cores", [1, 64])
def test_a_cpu_adds_up_while_it_copies(monkeypatch, cores):
    if why := checksum_native.NATIVE.why_not():
        pytest.skip(why)
    monkeypatch.setattr(module, "PIECE", 4 * BLOCK)
    monkeypatch.setattr(module, "_cores", lambda: set(range(cores * torch.get_num_threads())))
    source, to, passes = noise(40), torch.zeros(40 * BLOCK, dtype=torch.uint8), []
    found, real = make_sum(to), checksum_native.add_blocks
    monkeypatch.setattr(
        checksum_native, "add_blocks", lambda *given: (passes.append(given[-1]) if given[1] else None) or real(*given)
    )
    found.copy(to[:BLOCK], source[:BLOCK], 0)  # small
    found.copy(to[BLOCK : 11 * BLOCK + 8].view(torch.int16), source[BLOCK : 11 * BLOCK + 8].view(torch.int16), BLOCK)
    assert passes == [4, 4]
    found.copy(to[12 * BLOCK + 8 : 20 * BLOCK], source[12 * BLOCK + 8 : 20 * BLOCK], 12 * BLOCK + 8)  # within a block
    found.copy(to[20 * BLOCK :], source[20 * BLOCK :], 20 * BLOCK)
    source[11 * BLOCK + 8 : 12 * BLOCK + 8] = 0  # these were not copied
    assert passes == [4, 4, 4, 4, 4, 4, 4]
    assert torch.equal(to, source) and found.of(40 * BLOCK) == reference(source)


@pytest.mark.parametrize("cores", [1, 64])
def test_a_cpu_without_a_compiler_adds_up_what_it_has_just_copied(monkeypatch, cores):
    monkeypatch.setattr(checksum_native, "available", lambda: False)
    monkeypatch.setattr(module, "PIECE", 4 * BLOCK)
    monkeypatch.setattr(module, "_cores", lambda: set(range(cores * torch.get_num_threads())))
    source, to = noise(40), torch.zeros(40 * BLOCK, dtype=torch.uint8)
    found = make_sum(to)
    assert isinstance(found, CpuSum)
    found.copy(to[: 30 * BLOCK].view(torch.int16), source[: 30 * BLOCK].view(torch.int16), 0)
    assert len(found._adding) == (0 if cores == 1 else 7)
    found.copy(to[30 * BLOCK :], source[30 * BLOCK :], 30 * BLOCK)
    assert found.of(40 * BLOCK) == reference(source) and torch.equal(to, source)


KERNEL = """
import torch
from miles_workers.transport import checksum, checksum_kernel
from miles_workers.transport.checksum import BLOCK
checksum_kernel.CHUNK, checksum_kernel.TILE = 4, 2
source = torch.randint(0, 256, (37 * BLOCK,), dtype=torch.uint8)
to, total = torch.zeros_like(source), torch.zeros(1, dtype=torch.int64)
at = [(source.data_ptr() + n * BLOCK, to.data_ptr() + n * BLOCK) for n in range(37)]
jobs = [(*at[10], 10, 27, 0), (*at[0], 0, 9, 0), (at[9][0], 0, 9, 1, 0)]
checksum_kernel.run(jobs, total, BLOCK)
again = torch.zeros(1, dtype=torch.int64)
checksum_kernel.run(jobs, again, BLOCK)
assert int(again) == int(total) and checksum_kernel._table.cache_info()[:2] == (1, 1)
assert int(total) % 2**64 == checksum.checksum(source)
torch.cuda.device = lambda device: torch.no_grad()
several = [torch.randn(n) for n in (1, 256, 0, 300, 1500)] + [torch.randn(40, 3)[:, 1], torch.randn(600)[1:]]
found = checksum.checksums_of(several)
assert [n % 2**64 for n in found.tolist()] == [checksum.checksum_of(each) for each in several]
expected = source.clone()
expected[9 * BLOCK : 10 * BLOCK] = 0
assert torch.equal(to, expected)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs the kernel here")
def test_the_kernel_copies_and_adds_up():
    ran = subprocess.run(
        [sys.executable, "-c", KERNEL], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_and_a_cpu_find_the_same_sum():
    source = noise(5000)
    there, to = source.cuda(), torch.zeros(5000 * BLOCK, dtype=torch.uint8, device="cuda")
    found = make_sum(there)
    found.copy(to[1000 * BLOCK : 4001 * BLOCK], there[1000 * BLOCK : 4001 * BLOCK], 1000 * BLOCK, stays=True)
    assert found.of(5000 * BLOCK) == Sum(there).of(5000 * BLOCK) == checksum(source) == reference(source)
    assert torch.equal(to[1000 * BLOCK : 4001 * BLOCK].cpu(), source[1000 * BLOCK : 4001 * BLOCK])
    assert not to[: 1000 * BLOCK].any() and not to[4001 * BLOCK :].any()
