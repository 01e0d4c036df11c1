"""Sums of memory: on a CPU, and in one pass with copies, by the kernel of a GPU and the rules that choose it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from miles_core.sync import checksum as module
from miles_core.sync import checksum_native
from miles_core.sync.bucket import Bucket, unpacked
from miles_core.sync.checksum import BLOCK, InCache, OnePass, Sum, checksum, reading, summing


def noise(blocks):
    return torch.randint(0, 256, (blocks * BLOCK,), dtype=torch.uint8)


def reference(flat):
    """As the docstring of ``checksum`` defines it."""
    words = flat.view(torch.int64).view(-1, BLOCK // 8).sum(1).tolist()
    return sum(word * (2 * i + 1) * 0x9E3779B97F4A7C15 for i, word in enumerate(words)) % (1 << 64)


class Jobs:
    """The kernel, told apart: what it was asked, done by torch."""

    def __init__(self, memory):
        self.memory, self.launches = memory, []

    def run(self, jobs, total, block, spread):
        self.launches.append(jobs)
        for source, to, first, blocks in jobs:
            piece = self.at(source, blocks * block)
            if to:
                self.at(to, blocks * block).copy_(piece)
            sums = piece.view(torch.int64).view(-1, block // 8).sum(1)
            total += (sums * (2 * torch.arange(first, first + blocks) + 1) * spread).sum()

    def at(self, address, nbytes):
        for flat in self.memory:
            start = address - flat.data_ptr()
            if start >= 0 and start + nbytes <= len(flat):
                return flat[start : start + nbytes]
        raise AssertionError("no memory of ours")


@pytest.fixture
def jobs(monkeypatch):
    """``OnePass`` on memory of this host: (source, to), and what the kernel was asked."""
    source, to = noise(40), torch.zeros(40 * BLOCK, dtype=torch.uint8)
    kernel = Jobs([source, to])
    monkeypatch.setitem(sys.modules, "miles_core.sync.checksum_kernel", kernel)
    monkeypatch.setattr("miles_core.sync.checksum_kernel", kernel, raising=False)
    monkeypatch.setattr(module, "usable", lambda flat: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return source, to, kernel


def test_the_checksum_is_what_it_says():
    flat = noise(5)
    assert checksum(flat) == reference(flat)


def test_what_is_copied_is_added_up_in_the_same_launch_and_the_rest_beside_it(jobs):
    source, to, kernel = jobs
    found = summing(source)
    assert isinstance(found, OnePass)
    for at, blocks in ((20, 8), (4, 6), (10, 1)):
        part = slice(at * BLOCK, (at + blocks) * BLOCK)
        found.copy(to[part].view(2, -1), source[part].view(2, -1), at * BLOCK, stays=True)
    found.copy(to[: BLOCK + 8], source[: BLOCK + 8], 0, stays=True)  # not in whole blocks: at once
    assert not kernel.launches and torch.equal(to[: BLOCK + 8], source[: BLOCK + 8]) and not to[4 * BLOCK]
    assert found.of(30 * BLOCK) == reference(source[: 30 * BLOCK])
    (launch,) = kernel.launches
    assert sorted((first, blocks, to != 0) for _, to, first, blocks in launch) == [
        (0, 4, False), (4, 6, True), (10, 1, True), (11, 9, False), (20, 8, True), (28, 2, False)
    ]  # fmt: skip
    assert torch.equal(to[20 * BLOCK : 28 * BLOCK], source[20 * BLOCK : 28 * BLOCK]) and not to[12 * BLOCK :][:99].any()
    found.copy(to[:BLOCK], source[29 * BLOCK : 30 * BLOCK], 29 * BLOCK, stays=True)  # too late to wait
    assert torch.equal(to[:BLOCK], source[29 * BLOCK : 30 * BLOCK]) and len(kernel.launches) == 1


def test_pieces_count_as_one_and_each_may_be_copied(jobs):
    source, to, kernel = jobs
    pieces = source[: 3 * BLOCK], source[8 * BLOCK : 9 * BLOCK], source[16 * BLOCK : 20 * BLOCK]
    whole = reference(torch.cat(pieces))
    found = summing(*pieces)
    found.copy(to[:BLOCK], pieces[1], 3 * BLOCK, stays=True)
    assert found.of(8 * BLOCK) == whole == checksum(*pieces)
    assert torch.equal(to[:BLOCK], pieces[1]) and len(kernel.launches) == 2
    assert Sum(*pieces).of(8 * BLOCK) == whole and checksum(source[:0]) == 0


def test_what_is_there_is_added_up_while_more_is_found(jobs, monkeypatch):
    source, to, kernel = jobs
    monkeypatch.setattr(module, "FIRST_LAUNCH", 8 * BLOCK)
    monkeypatch.setattr(module, "LAUNCH", 10 * BLOCK)
    found = summing(source[: 8 * BLOCK])
    found.up_to(8 * BLOCK)
    for piece in range(1, 5):
        found.append(source[piece * 8 * BLOCK : (piece + 1) * 8 * BLOCK])
        if piece == 2:
            found.copy(to[: 8 * BLOCK], source[16 * BLOCK : 24 * BLOCK], 16 * BLOCK, stays=True)
        found.up_to((piece + 1) * 8 * BLOCK)
    assert [sum(blocks for *_, blocks in launch) for launch in kernel.launches] == [8, 16, 16]
    assert torch.equal(to[: 8 * BLOCK], source[16 * BLOCK : 24 * BLOCK])
    assert found.of(40 * BLOCK) == reference(source) and len(kernel.launches) == 3


def test_what_is_read_is_added_up_in_launches_that_grow(jobs, monkeypatch):
    source, _, kernel = jobs
    monkeypatch.setattr(module, "FIRST_LAUNCH", 4 * BLOCK)
    monkeypatch.setattr(module, "LAUNCH", 8 * BLOCK)
    found = reading(source)
    for start in range(0, 36, 3):
        found.read(source[start * BLOCK : (start + 3) * BLOCK].view(torch.int32).view(4, -1))
    assert isinstance(found, OnePass) and [len(launch) for launch in kernel.launches] == [2, 3, 3, 3]
    assert found.of(36 * BLOCK) == reference(source[: 36 * BLOCK]) and len(kernel.launches) == 5


def test_a_tensor_that_the_receiver_put_elsewhere_is_copied_from_there(jobs):
    _, to, kernel = jobs
    memory = noise(60)
    kernel.memory.append(memory)
    bucket = Bucket(memory[20 * BLOCK : 30 * BLOCK])
    bucket.end, bucket.units = 10 * BLOCK, [["a", "", [["a", "uint8", [8 * BLOCK], 0]]]]
    for unit in unpacked(bucket.header(), bucket.buffer):
        for start in (0, 40 * BLOCK):
            moved = memory[start : start + 8 * BLOCK]
            unit.copy(to[: 8 * BLOCK], moved)
            assert torch.equal(to[: 8 * BLOCK], moved)


def test_a_source_that_may_change_is_copied_at_once(jobs, monkeypatch):
    source, to, kernel = jobs
    found = summing(to)
    monkeypatch.setattr(module, "PIECE", 2 * BLOCK)
    found.copy(to[: 4 * BLOCK], source[: 4 * BLOCK], 0)
    found.copy(to[4 * BLOCK : 5 * BLOCK], source[4 * BLOCK : 5 * BLOCK], 4 * BLOCK)  # small: not worth a launch
    assert len(kernel.launches) == 1 and torch.equal(to[: 5 * BLOCK], source[: 5 * BLOCK])
    source.zero_()
    assert found.of(40 * BLOCK) == reference(to)


def test_other_dtypes_and_layouts_are_copied_as_torch_does(jobs):
    source, to, kernel = jobs
    found = summing(source)
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
    checksum_native.copy_and_add(source.data_ptr(), to.data_ptr(), sums.data_ptr(), 40)
    assert torch.equal(to, source) and not memory[:start].any() and not memory[start + 40 * BLOCK :].any()
    assert torch.equal(sums, source.view(torch.int64).view(40, -1).sum(1))


@pytest.mark.parametrize("cores", [1, 64])
def test_a_cpu_adds_up_while_it_copies(monkeypatch, cores):
    if why := checksum_native.NATIVE.why_not():
        pytest.skip(why)
    monkeypatch.setattr(module, "PIECE", 4 * BLOCK)
    monkeypatch.setattr(module, "_cores", lambda: set(range(cores * torch.get_num_threads())))
    source, to, told, passes = noise(40), torch.zeros(40 * BLOCK, dtype=torch.uint8), [], []
    found, real = summing(to, written=told.append), checksum_native.copy_and_add
    monkeypatch.setattr(checksum_native, "copy_and_add", lambda *given: passes.append(given[-1]) or real(*given))
    found.copy(to[:BLOCK], source[:BLOCK], 0)  # small
    found.copy(to[BLOCK : 11 * BLOCK + 8].view(torch.int16), source[BLOCK : 11 * BLOCK + 8].view(torch.int16), BLOCK)
    assert passes == [4, 4] and told == [BLOCK, 5 * BLOCK, 9 * BLOCK]
    found.copy(to[12 * BLOCK + 8 : 20 * BLOCK], source[12 * BLOCK + 8 : 20 * BLOCK], 12 * BLOCK + 8)  # within a block
    found.copy(to[20 * BLOCK :], source[20 * BLOCK :], 20 * BLOCK)
    source[11 * BLOCK + 8 : 12 * BLOCK + 8] = 0  # nobody copied these
    assert passes == [4, 4, 4, 4, 4, 4, 4] and told[-1] == 40 * BLOCK
    assert torch.equal(to, source) and found.of(40 * BLOCK) == reference(source)


@pytest.mark.parametrize("cores", [1, 64])
def test_a_cpu_without_a_compiler_adds_up_what_it_has_just_copied(monkeypatch, cores):
    monkeypatch.setattr(checksum_native, "available", lambda: False)
    monkeypatch.setattr(module, "PIECE", 4 * BLOCK)
    monkeypatch.setattr(module, "_cores", lambda: set(range(cores * torch.get_num_threads())))
    source, to = noise(40), torch.zeros(40 * BLOCK, dtype=torch.uint8)
    told = []
    found = summing(to, written=told.append)
    assert isinstance(found, InCache)
    found.copy(to[: 30 * BLOCK].view(torch.int16), source[: 30 * BLOCK].view(torch.int16), 0)
    assert told == [n * BLOCK for n in range(4, 29, 4)] and len(found._adding) == (0 if cores == 1 else 7)
    found.copy(to[30 * BLOCK :], source[30 * BLOCK :], 30 * BLOCK)
    assert found.of(40 * BLOCK) == reference(source) and torch.equal(to, source) and told[-1] == 40 * BLOCK


KERNEL = """
import torch
from miles_core.sync import checksum, checksum_kernel
from miles_core.sync.checksum import BLOCK
checksum_kernel.CHUNK, checksum_kernel.TILE = 4, 2
source = torch.randint(0, 256, (37 * BLOCK,), dtype=torch.uint8)
to, total = torch.zeros_like(source), torch.zeros(1, dtype=torch.int64)
at = [(source.data_ptr() + n * BLOCK, to.data_ptr() + n * BLOCK) for n in range(37)]
jobs = [(*at[10], 10, 27), (*at[0], 0, 9), (at[9][0], 0, 9, 1)]
checksum_kernel.run(jobs, total, BLOCK, checksum._SPREAD)
again = torch.zeros(1, dtype=torch.int64)
checksum_kernel.run(jobs, again, BLOCK, checksum._SPREAD)
assert int(again) == int(total) and checksum_kernel._table.cache_info()[:2] == (1, 1)
assert int(total) % 2**64 == checksum.checksum(source)
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
    found = summing(there)
    found.copy(to[1000 * BLOCK : 4001 * BLOCK], there[1000 * BLOCK : 4001 * BLOCK], 1000 * BLOCK, stays=True)
    assert found.of(5000 * BLOCK) == Sum(there).of(5000 * BLOCK) == checksum(source) == reference(source)
    assert torch.equal(to[1000 * BLOCK : 4001 * BLOCK].cpu(), source[1000 * BLOCK : 4001 * BLOCK])
    assert not to[: 1000 * BLOCK].any() and not to[4001 * BLOCK :].any()
