"""What a run is built of: the parts of each policy, made by its runtime and released."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from miles_core.contracts.policy import check_policies
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts, Runtime
from miles_core.observe.hints import for_error
from miles_core.plugin.hint import Hint
from miles_core.plugin.load import compose
from miles_core.rollout.collect import Interrupted

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Seconds between two looks whether the user asked to stop.
LOOK = 0.2


@contextmanager
def told(run: Run, hints: Iterable[Hint]) -> Iterator[None]:
    """``on_start`` before and ``on_stop`` after the body, with the error that ended it; what helps against it is logged."""
    error: BaseException | None = None
    try:
        run.hooks.on("on_start", run=run)
        check_policies(run.policies)
        yield
    except Interrupted:
        log.info("stopped while the run was built: steps that no checkpoint holds are not kept")
    except BaseException as caught:
        error = caught
        if hint := for_error(caught, hints):
            log.error("%s", hint)
        raise
    finally:
        run.hooks.on("on_stop", run=run, error=error)


def runtime_of(run: Run) -> Runtime:
    """The run's runtime, which has built nothing yet."""
    made: Runtime = run.hooks.make("runtime", run.config.run.runtime, run=run)
    return made


def settle() -> None:
    """What was made so far stays: a full collection would look at every object of every imported module, tenths of a second each few steps.
    ``gc.unfreeze`` ends it."""
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def built(run: Run, runtime: Runtime | None = None) -> AsyncIterator[list[PolicyParts]]:
    """Learner and engine of every policy, made by a runtime (the run's by default) and released in every case. Interrupted when the user
    asks to stop before they are there."""
    runtime = runtime or runtime_of(run)
    try:
        parts = [await unless_stopped(run, runtime.build(policy)) for policy in run.policies]
        wrap_learn(run, parts)
        settle()
        yield parts
    finally:
        gc.unfreeze()
        await runtime.close()


def wrap_learn(run: Run, parts: Sequence[PolicyParts]) -> None:
    """Put what plugins wrap around ``learn`` into the parts of each policy that trains."""
    handles = {each.policy.name: each.learner for each in parts}
    for each in parts:
        if each.policy.role == "train":
            chain = run.hooks.chain("wrap_learn", run=run, policy=each.policy, handles=handles)
            each.learn = compose(each.learner.learn, chain)


async def unless_stopped(run: Run, building: Coroutine[Any, Any, T]) -> T:
    """What is built; Interrupted when the user asks to stop, as an engine may take minutes to come up."""
    task = asyncio.ensure_future(building)
    try:
        while not task.done():
            if run.stop_requested:
                raise Interrupted
            await asyncio.wait([task], timeout=LOOK)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
