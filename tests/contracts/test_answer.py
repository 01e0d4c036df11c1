"""Answers tell their receiver at once, and engines which requests were cancelled."""

from __future__ import annotations

import asyncio

import pytest

from miles_core.contracts.answer import Answer


@pytest.mark.parametrize("end", ["result", "exception", "cancel"])
def test_a_receiver_is_called_in_the_call_that_ends_the_answer(end):
    async def main():
        cancelled, received = [], []
        answer = Answer(cancelled)
        answer.receiver = received.append
        {"result": answer.set_result, "exception": answer.set_exception, "cancel": answer.cancel}[end](
            ValueError("broken")
        )
        assert received == [answer] and cancelled == [answer] * (end == "cancel")
        assert not answer.cancel() and len(cancelled) == (end == "cancel")
        if end == "exception":
            assert isinstance(answer.exception(), ValueError)

    asyncio.run(main())


def test_a_task_that_awaits_an_answer_cancels_it():
    async def main():
        cancelled = []
        answer = Answer(cancelled)

        async def wait():
            await answer

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert cancelled == [answer] and answer.cancelled()

    asyncio.run(main())
