"""Collecting one rollout: groups of samples with rewards, filtered, over-sampled, in a fixed order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError
from miles_core.observe.progress import Progress
from miles_core.rollout.queue import Prompt, PromptQueue

if TYPE_CHECKING:
    from miles_core.contracts.run import Run

Group = list[Sample]
Score = Callable[[list[Sample]], Awaitable[None]]


#: Seconds until a request to stop is noticed while no group finishes (a slow tool, a slow judge).
PATIENCE = 0.5


class Interrupted(Exception):
    """The user asked to stop while a rollout or the warm start was under way; what it had done is dropped."""


class Collector:
    """Produces the groups of one step.

    Args:
        run: for configuration, and whether the user asked to stop.
        prompts: where they come from; unused ones go back.
        generate: ``async (sample) -> [samples]``.
        score: ``async (samples) -> None``, sets rewards.
        abort: ``async () -> None``, stops what the engines are doing.
        progress: told about every finished group.
        accept: group filter, or None to take every group.
    """

    def __init__(
        self,
        run: Run,
        prompts: PromptQueue,
        generate: Callable[[Sample], Awaitable[list[Sample]]],
        score: Score,
        abort: Callable[[], Awaitable[None]],
        progress: Progress,
        accept: Callable[[Any, Group], bool] | None = None,
    ) -> None:
        self.run, self.prompts, self.generate, self.score = run, prompts, generate, score
        self.abort, self.progress, self.accept = abort, progress, accept
        self.dropped = 0

    async def rollout(self, step: int) -> list[Group]:
        """``--rollout-batch-size`` groups that passed the filter, ordered by group number.

        ``--over-sampling-batch-size`` prompts are in flight at first; as groups are refused, more are sent until enough
        are accepted. Groups then unfinished are aborted and their prompts go back to the front of the queue.
        """
        options = self.run.config.rollout
        want = options.batch_size
        ahead = max(want, options.over_sampling_batch_size or want)
        accepted: list[tuple[Prompt, Group]] = []
        refused = 0
        pending: dict[asyncio.Task[Group], Prompt] = {}
        self._launch(pending, ahead)
        try:
            while len(accepted) < want:
                if self.run.stop_requested:
                    raise Interrupted
                done, _ = await asyncio.wait(pending, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda t: pending[t].group_index):
                    prompt = pending.pop(task)
                    group = task.result()
                    if self.accept is None or self.accept(self.run.config.args, group):
                        accepted.append((prompt, group))
                    else:
                        refused += 1
                        self._give_up_when_nothing_passes(refused, len(accepted))
                missing = want - len(accepted)
                if len(pending) < missing:
                    self._launch(pending, missing - len(pending))
        finally:
            await self._abort(pending)
        accepted.sort(key=lambda item: item[0].group_index)
        self.prompts.put_back([prompt for prompt, _ in accepted[want:]])
        self.dropped = refused
        return [group for _, group in accepted[:want]]

    def _launch(self, pending: dict[asyncio.Task[Group], Prompt], count: int) -> None:
        for prompt in self.prompts.next(count):
            samples = prompt.samples(self.run.config.rollout.n_samples_per_prompt)
            pending[asyncio.create_task(self._group(samples))] = prompt

    async def _group(self, samples: Group) -> Group:
        made = await asyncio.gather(*(self.generate(s) for s in samples))
        group = [s for siblings in made for s in siblings]
        usable = [s for s in group if s.status is not Status.FAILED]
        if not usable:
            raise DataError(f"every sample of group {samples[0].group_index} failed; see run.log for the tools' errors")
        if not any(s.status is Status.ABORTED for s in usable):
            await self.score(usable)
        self.progress.advance(len(group))
        return usable

    async def _abort(self, pending: dict[asyncio.Task[Group], Prompt]) -> None:
        """Stop what is still running; unused prompts are generated first next time."""
        if not pending:
            return
        await self.abort()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self.prompts.put_back(sorted(pending.values(), key=lambda p: p.group_index))

    def _give_up_when_nothing_passes(self, refused: int, accepted: int) -> None:
        limit = 20 * self.run.config.rollout.batch_size
        if accepted == 0 and refused >= limit:
            raise DataError(
                f"the group filter refused all of {refused} groups; loosen --dynamic-sampling-filter-path, use easier or "
                "harder prompts, or raise --n-samples-per-prompt"
            )
