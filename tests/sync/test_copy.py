"""The in-process transport: what it delivers and what it counts."""

from __future__ import annotations

import asyncio

import pytest
import torch

from miles_core.data.weight_unit import Encoded
from miles_core.sync.push import CopyTransport


class Engine:
    """Takes weights; fails at a chosen tensor."""

    def __init__(self, bad=None):
        self.bad, self.taken, self.version = bad, [], -1

    async def update_weights(self, units, version):
        for unit in units:
            if unit.name == self.bad:
                raise ValueError(f"cannot take {unit.name}")
            self.taken.append(unit.name)
        self.version = version


def encoded():
    yield Encoded("a.weight", {"a.weight": torch.zeros(4, 8, dtype=torch.uint8), "a.weight_scale_inv": torch.zeros(4)})
    yield Encoded("b.weight", {"b.weight": torch.zeros(3, dtype=torch.bfloat16)})


def test_everything_arrives_and_stored_bytes_are_counted():
    engine = Engine()
    report = asyncio.run(CopyTransport(engine).send(encoded(), 7))
    assert engine.taken == ["a.weight", "b.weight"] and engine.version == report.version == 7
    assert (report.nbytes, report.tensors) == (32 + 16 + 6, 3) and report.seconds >= 0


def test_a_failure_reaches_the_caller_and_no_version_is_claimed():
    engine = Engine(bad="b.weight")
    with pytest.raises(ValueError, match=r"cannot take b\.weight"):
        asyncio.run(CopyTransport(engine).send(encoded(), 1))
    assert engine.version == -1


def test_a_run_counts_what_the_format_stores(toy_run):
    bf16 = toy_run(steps=1, dtype="bfloat16").metrics[0]["sync/bytes"]
    fp8 = toy_run(["fp8"], steps=1, dtype="bfloat16", rollout_precision="fp8", emulate_precision=True)
    assert 0 < fp8.metrics[0]["sync/bytes"] < bf16
