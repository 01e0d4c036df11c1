"""Builds and releases the parts of each policy (learner and engine) with the run's runtime."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from miles_core.contracts.run import Run, check_policies
from miles_core.contracts.runtime import PolicyParts, Runtime
from miles_core.observe.hints import for_error
from miles_core.plugin.hint import Hint
from miles_core.plugin.load import compose
from miles_core.rollout.collect import Interrupted

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Interval in seconds at which a stop request is checked.
POLL = 0.2


@contextmanager
def notify_plugins(run: Run, hints: Iterable[Hint]) -> Iterator[None]:
    """Call ``on_start`` before and ``on_stop`` after the body; ``on_stop`` receives the error that ended it. If a hint matches the
    error, log it."""
    error: BaseException | None = None
    try:
        run.hooks.on("on_start", run=run)
        check_policies(run.policies, run.generates)
        yield
    except Interrupted:
        log.info("stopped while the run was built: steps after the last checkpoint are lost")
    except BaseException as caught:
        error = caught
        if hint := for_error(caught, hints):
            log.error("%s", hint)
        raise
    finally:
        run.hooks.on("on_stop", run=run, error=error)


def runtime_of(run: Run) -> Runtime:
    """Create the run's runtime; it builds parts later."""
    made: Runtime = run.hooks.make("runtime", run.config.run.runtime, run=run)
    return made


def freeze_gc() -> None:
    """Exclude everything allocated so far from garbage collection. Otherwise every full collection would visit all objects of all imported
    modules, which takes tenths of a second every few steps. ``gc.unfreeze`` reverses this. A step makes thousands of objects that live until
    its end, and hardly any garbage in cycles, so a collection follows many more objects than Python's default of 700: it visits all new ones."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@asynccontextmanager
async def build_parts(run: Run, runtime: Runtime | None = None) -> AsyncIterator[list[PolicyParts]]:
    """Build learner and engine of every policy with a runtime (default: the run's), and close the runtime after the body.

    Raises:
        Interrupted: the user requested a stop before all parts were built.
    """
    runtime = runtime or runtime_of(run)
    try:
        parts = [await await_unless_stopped(run, runtime.build(policy)) for policy in run.policies]
        wrap_learn(run, parts)
        freeze_gc()
        yield parts
    finally:
        gc.unfreeze()
        await runtime.close()


def wrap_learn(run: Run, parts: Sequence[PolicyParts]) -> None:
    """Set ``learn`` of each trained policy to the learner's method with the ``wrap_learn`` hooks applied."""
    handles = {each.policy.name: each.learner for each in parts}
    engines = {each.policy.name: each.engine for each in parts if each.engine is not None}
    for each in parts:
        if each.policy.role == "train":
            chain = run.hooks.chain("wrap_learn", run=run, policy=each.policy, handles=handles, engines=engines)
            each.learn = compose(each.learner.learn, chain)


async def await_unless_stopped(run: Run, building: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that may take minutes, such as the start of an engine.

    Raises:
        Interrupted: the user requested a stop before it finished.
    """
    task = asyncio.ensure_future(building)
    try:
        while not task.done():
            if run.stop_requested:
                raise Interrupted
            await asyncio.wait([task], timeout=POLL)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
