"""Saves the checkpoints of a run and resumes from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from miles_core.checkpoint.directory import Checkpoints, seal
from miles_core.checkpoint.rng import get_rng, put_rng, rng_state
from miles_core.checkpoint.samples import get_samples, put_samples
from miles_core.checkpoint.store import Store
from miles_core.checkpoint.tensor_file import Saving
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.contracts.schedule import Position, Schedule
from miles_core.errors import CheckpointError

log = logging.getLogger(__name__)

#: Store entry with finished samples that were not trained on yet.
HELD = "held"
#: Interval in seconds at which the driver asks whether the ranks have written a checkpoint.
INTERVAL = 0.2


class RunCheckpoints:
    """Saves the state of completed steps only.

    Generation changes the schedule's state during a step (position in the prompts, finished samples). This state is committed when
    the step is complete; an interrupted rollout is rolled back to the last commit.

    Args:
        run, parts, schedule: objects whose state is saved and restored.
        resume_from: a verified checkpoint to continue from.
    """

    def __init__(self, run: Run, parts: list[PolicyParts], schedule: Schedule, resume_from: Path | None = None) -> None:
        self.run, self.parts, self.schedule, self.resume_from = run, parts, schedule, resume_from
        self.directories = Checkpoints(run.directory / "checkpoints")
        self.saved_step: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._mark()

    async def commit(self) -> None:
        """Commit a completed step as the state to roll back to, and save a checkpoint if one is due."""
        self._mark()
        options = self.run.config.run
        if self._task is not None and self._task.done():
            await self.complete()
        if options.save_interval and self.run.step % options.save_interval == 0:
            await self.save(later=options.async_save)

    def roll_back(self) -> None:
        """Discard an unfinished rollout and restore the state after the last completed step."""
        log.info("interrupted: the unfinished rollout is dropped; %d steps are complete", self.run.step)
        self.schedule.load_state(self._committed)

    async def rescue(self) -> None:
        """Save the last completed step of a run that ends with an error, if its weights are still available.

        They are not if the error occurred between two optimiser steps of one rollout step. A step that failed after training (in
        its sync or evaluation) counts as complete. Never raises, so that the original error is reported.
        """
        run = self.run
        try:
            intact = all([await each.learner.is_intact() for each in self.parts])
            if run.step > self._step:
                self._mark()
            elif not intact or self._trained != [policy.trained for policy in run.policies]:
                log.warning(
                    "step %d had changed the weights of step %d: steps after the last checkpoint are lost",
                    run.step + 1,
                    self._step,
                )
                return
            await self.complete()
            if self.saved_step != run.step and (run.step > 0 or run.config.sft.data):
                await self.save()
        except Exception as failed:
            log.error("the last completed step (%d) cannot be saved: %s", self._step, failed)

    def _mark(self) -> None:
        self._step, self._committed, self._rng = self.run.step, self.schedule.state(), rng_state()
        self._trained = [policy.trained for policy in self.run.policies]

    async def finish(self) -> None:
        """Save the last step of a finished or interrupted run, and export the models with ``--export-hf``."""
        if self.saved_step != self.run.step:
            await self.save()
        if target := self.run.config.run.export_hf:
            for each in self.parts:
                if each.policy.role == "train":
                    alone = self.run.is_only_trained(each.policy)
                    await each.learner.export(Path(target) if alone else Path(target) / each.policy.name)

    async def save(self, later: bool = False) -> None:
        """Write the checkpoint of the last completed step. With ``later``, return when the state is copied, and write it while the
        run continues; ``complete`` waits for it."""
        await self.complete()
        copied = asyncio.Event()
        self._task = asyncio.create_task(self._save(later, copied))
        with self.run.clock.phase("save"):
            waiting = asyncio.create_task(copied.wait())
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not later or self._task.done():
                await self.complete()

    async def complete(self) -> None:
        """Wait for the checkpoint that is being written. Raises CheckpointError if it cannot be written."""
        task, self._task = self._task, None
        if task is not None:
            await task

    async def close(self) -> None:
        """Discard a checkpoint that is incomplete."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)  # its error has no other reader

    async def _save(self, later: bool, copied: asyncio.Event) -> None:
        run, plan, step = self.run, self.run.plan.record(), self.run.step
        async with _in_threads(self.directories.save(step, plan)) as directory:
            for each in self.parts:
                await each.learner.save(directory / each.policy.name, *([True] if later else ()))
            with Saving(directory) as own:
                store = Store(directory / "state")
                await asyncio.to_thread(self._put_state, store)
                run.hooks.on("on_save", run=run, policy=None, store=store)
            digests = own.digests() or {}
            copied.set()
            for each in self.parts:
                while (found := await each.learner.collect_digests()) is None:
                    await asyncio.sleep(INTERVAL)
                digests |= {f"{each.policy.name}/{name}": digest for name, digest in found.items()}
            await asyncio.to_thread(seal, directory, step, plan, digests)
        self.saved_step = step
        if run.config.run.keep:
            await asyncio.to_thread(self.directories.keep, run.config.run.keep)

    def _put_state(self, store: Store) -> None:
        run = self.run
        trained = {policy.name: policy.trained for policy in run.policies}
        versions = {policy.name: policy.version for policy in run.policies}
        store.put("run", data={"step": run.step, "trained": trained, "versions": versions, **self._committed.data})
        if self._committed.samples:
            put_samples(store, HELD, self._committed.samples)
        put_rng(store, self._rng)

    async def resume(self) -> bool:
        """Load ``resume_from`` and return True; return False if this is a new run.

        Raises:
            CheckpointError: the checkpoint's policies differ from those of this run.
        """
        run, directory = self.run, self.resume_from
        if directory is None:
            run.started = True
            return False
        store = Store(directory / "state")
        _, state = await asyncio.to_thread(store.get, "run")
        saved, here = sorted(state["trained"]), sorted(policy.name for policy in run.policies)
        if saved != here:
            raise CheckpointError(
                f"{directory} holds the policies {', '.join(saved)}, but this run has {', '.join(here)}; continue it with the plugin that "
                "created the policies, under the same names"
            )
        for each in self.parts:
            await each.learner.load(directory / each.policy.name)
        run.step = int(state["step"])
        for policy in run.policies:
            policy.trained = int(state["trained"][policy.name])
            policy.version = int(state.get("versions", {}).get(policy.name, run.step))
        samples = await asyncio.to_thread(get_samples, store, HELD) if HELD in store else ()
        self.schedule.load_state(Position(state, tuple(samples)))
        await asyncio.to_thread(get_rng, store)
        if directory.parent.resolve() == self.directories.directory.resolve():
            self.saved_step = run.step
        run.hooks.on("on_load", run=run, policy=None, store=store)
        self._mark()
        run.started = True
        log.info("continuing %s: %d steps are complete", directory, run.step)
        return True


@asynccontextmanager
async def _in_threads(manager: AbstractContextManager[Path]) -> AsyncIterator[Path]:
    """Enter and exit ``manager``, which waits for the disk, in threads, so that the event loop continues."""
    value = await asyncio.to_thread(manager.__enter__)
    details: tuple[Any, ...] = (None, None, None)
    try:
        yield value
    except BaseException as error:
        details = (type(error), error, error.__traceback__)
        raise
    finally:
        await asyncio.to_thread(manager.__exit__, *details)
