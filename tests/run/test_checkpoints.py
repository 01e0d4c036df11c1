"""Checkpoints that a run abandons."""

from __future__ import annotations

import asyncio
import gc

from miles_core.run.checkpoints import RunCheckpoints


def test_the_error_of_an_abandoned_checkpoint_is_not_reported_again():
    async def write():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise OSError("its worker has ended") from None

    async def abandon():
        reported = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["message"]))
        checkpoints = RunCheckpoints.__new__(RunCheckpoints)
        checkpoints._task = asyncio.create_task(write())
        await asyncio.sleep(0)
        await checkpoints.close()
        gc.collect()
        return reported

    assert asyncio.run(abandon()) == []
