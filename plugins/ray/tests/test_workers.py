"""Errors of worker processes keep their class, and say where they were raised."""

from __future__ import annotations

import asyncio

import pytest

ray = pytest.importorskip("ray")


def test_an_error_of_a_worker_has_its_class_and_traceback():
    from miles_ray.workers import RayWorkers

    async def fail():
        raised = ray.exceptions.RayTaskError("answer", "Traceback: line 7 of layer.py", RuntimeError("no such axis"))
        raise raised.as_instanceof_cause()

    workers = RayWorkers.__new__(RayWorkers)
    with pytest.raises(RuntimeError, match=r"^no such axis") as caught:
        asyncio.run(workers._answer(0, fail()))
    assert type(caught.value) is RuntimeError and "line 7 of layer.py" in caught.value.__notes__[0]
