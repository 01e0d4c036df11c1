"""A push that fails is repeated, then replaced by the plain copy, and each is logged once."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from miles_core.contracts.transport import SyncReport
from miles_core.errors import SyncError
from miles_core.sync.push import push, stage


def pushed(failures, caplog):
    caplog.set_level(logging.WARNING)
    calls = []

    async def one(version, plain=False):
        calls.append(plain)
        if len(calls) <= failures:
            raise SyncError(f"bucket {len(calls)} is not what was sent")
        return SyncReport(version, 1, 1, 1.0)

    parts = SimpleNamespace(learner=SimpleNamespace(push=one))
    try:
        assert asyncio.run(push(parts, 9)).version == 9
    finally:
        said = [record.message for record in caplog.records]
    return calls, said


@pytest.mark.parametrize(("failures", "calls"), [(0, [False]), (1, [False, False]), (2, [False, False, True])], ids=str)
def test_it_is_pushed_until_it_arrives(failures, calls, caplog):
    made, said = pushed(failures, caplog)
    assert made == calls and len(said) == failures
    if failures:
        assert said[0] == "weights of version 9 are pushed again: bucket 1 is not what was sent"
    if failures == 2:
        assert said[1].startswith("weights travel by the plain copy from version 9 on") and said[1].endswith(
            "bucket 2 is not what was sent"
        )


def test_a_plain_copy_that_fails_ends_the_run(caplog):
    with pytest.raises(SyncError, match="bucket 3"):
        pushed(3, caplog)


def test_what_could_not_be_staged_is_forgotten_on_every_rank(caplog):
    caplog.set_level(logging.WARNING)
    staged = []

    async def one(version):
        staged.append(version)
        if version is not None:
            raise SyncError("a bucket is wrong")

    asyncio.run(stage(SimpleNamespace(learner=SimpleNamespace(stage=one)), 4))
    assert staged == [4, None]
    assert caplog.records[0].message == (
        "version 4 could not be staged and is sent while the engine waits: a bucket is wrong"
    )
