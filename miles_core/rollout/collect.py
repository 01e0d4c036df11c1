"""Groups of samples on their way: in flight, finished, filtered, collected for a step in a fixed order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from miles_core.contracts.schedule import Position
from miles_core.data.means import means
from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError
from miles_core.observe.progress import Progress
from miles_core.rollout.partial import partial_rollout
from miles_core.rollout.queue import Prompt, PromptQueue

if TYPE_CHECKING:
    from miles_core.contracts.run import Run

Group = list[Sample]
Rollout = Callable[[int], Awaitable[list[Group]]]
Pairs = dict[str, tuple[float, float]]
Score = Callable[[list[Sample]], Awaitable[None]]


#: Seconds until a request to stop is noticed while no group finishes (a slow tool, a slow judge).
PATIENCE = 0.5


class Interrupted(Exception):
    """The user asked to stop while a rollout or the warm start was under way; what it had done is dropped."""


class Collector:
    """Produces groups. A schedule decides when, and how many are under way.

    Args:
        run: for configuration, and whether the user asked to stop.
        prompts: where they come from; unused ones go back.
        generate: ``async (sample) -> [samples]``.
        score: ``async (samples) -> None``, sets rewards.
        abort: ``async (samples) -> None``, makes the engines drop all requests of the samples with these numbers.
        progress: told about every finished group.
        accept: group filter, or None to take every group.
        answers: numbers about requests and rollouts, metric -> (sum, count); read by ``metrics``.

    Attributes:
        pending: groups in flight and their prompts.
        ready: finished groups that passed the filter.
        popped: prompts of the groups that were taken, until ``used``.
    """

    def __init__(
        self,
        run: Run,
        prompts: PromptQueue,
        generate: Callable[[Sample], Awaitable[list[Sample]]],
        score: Score,
        abort: Callable[[Collection[int]], Awaitable[None]],
        progress: Progress,
        accept: Callable[[Any, Group], bool] | None = None,
        answers: Pairs | None = None,
    ) -> None:
        self.run, self.prompts, self.generate, self.score = run, prompts, generate, score
        self.abort, self.progress, self.accept, self.answers = (
            abort,
            progress,
            accept,
            {} if answers is None else answers,
        )
        self.pending: dict[asyncio.Task[Group], Prompt] = {}
        self.ready: list[tuple[Prompt, Group]] = []
        self.popped: list[Prompt] = []
        self._refused = 0
        self._news = asyncio.Event()
        self._done: list[asyncio.Task[Group]] = []

    async def rollout(self, step: int) -> list[Group]:
        """``--rollout-batch-size`` groups that passed the filter, ordered by group number.

        ``--over-sampling-batch-size`` prompts are in flight at first; as groups are refused, more are sent until enough
        are accepted. Groups then unfinished are aborted and their prompts go back to the front of the queue; with
        ``--partial-rollout`` they stay in flight, and finished ones that are too many wait for the next collection.
        """
        options = self.run.config.rollout
        want = options.batch_size
        self.refill(max(want, options.over_sampling_batch_size or want))
        try:
            while len(self.ready) < want:
                await self.advance()
                self.refill(want)
        except BaseException:
            await self.drop()
            raise
        groups = self.pop(want)
        if not partial_rollout(self.run.config):
            await self.drop()
        return groups

    def refill(self, count: int) -> None:
        """Send prompts until ``count`` groups are in flight or ready."""
        for prompt in self.prompts.next(max(0, count - len(self.pending) - len(self.ready))):
            samples = prompt.samples(self.run.config.rollout.n_samples_per_prompt)
            task = asyncio.create_task(self._group(samples))
            task.add_done_callback(self._finished)
            self.pending[task] = prompt

    def _finished(self, task: asyncio.Task[Group]) -> None:
        self._done.append(task)
        self._news.set()

    async def advance(self) -> None:
        """Wait until some group in flight finishes (or a moment); those the filter accepts are ready then."""
        if self.run.stop_requested:
            raise Interrupted
        try:
            async with asyncio.timeout(PATIENCE):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()
        done = [task for task in self._done if task in self.pending]
        self._done = sorted(done, key=lambda task: self.pending[task].group_index, reverse=True)
        while self._done:
            task = self._done.pop()
            prompt, group = self.pending[task], task.result()
            del self.pending[task]
            if self.accept is None or self.accept(self.run.config.args, group):
                self.ready.append((prompt, group))
            else:
                self.prompts.used([prompt])
                self._refused += 1
                self._give_up_when_nothing_passes()

    def pop(self, count: int) -> list[Group]:
        """Take the ``count`` ready groups with the lowest numbers."""
        self._refused = 0
        self.ready.sort(key=lambda item: _number(item[0]))
        return self.take_out([_number(prompt) for prompt, _ in self.ready[:count]])

    def take_out(self, numbers: Collection[int]) -> list[Group]:
        """Take the ready groups with these numbers."""
        wanted = set(numbers)
        taken = [item for item in self.ready if item[0].group_index in wanted]
        self.ready = [item for item in self.ready if item[0].group_index not in wanted]
        self.popped += [prompt for prompt, _ in taken]
        return [group for _, group in taken]

    def used(self) -> None:
        """A step trains on everything that was taken so far."""
        self.prompts.used(self.popped)
        self.popped = []

    async def drop(self) -> None:
        """Stop what is in flight; its prompts, and those of groups that are ready, are generated first next time."""
        if self.pending:
            gone, self.pending = self.pending, {}
            for task in gone:
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            count = self.run.config.rollout.n_samples_per_prompt
            await self.abort([index for prompt in gone.values() for index in prompt.indexes(count)])
            self.prompts.put_back(sorted(gone.values(), key=_number))
        left, self.ready = [prompt for prompt, _ in self.ready], []
        self.prompts.put_back(sorted(left, key=_number))

    def metrics(self) -> dict[str, float]:
        """Means of the numbers about requests and rollouts since the last call: ``engine/NAME`` (``Response.metrics``) and those of
        rollout functions."""
        found = means(self.answers)
        self.answers.clear()
        return found

    def state(self, taken: Sequence[Group] = ()) -> Position:
        """What a checkpoint keeps: ready groups, and ``taken`` ones that no step has trained on yet, with their samples;
        every other prompt that is out is generated again."""
        prompts = {p.group_index: p for p in (*self.popped, *(prompt for prompt, _ in self.ready))}
        groups = {g[0].group_index: g for g in (*taken, *(group for _, group in self.ready)) if g}
        data: dict[str, Any] = {"prompts": self.prompts.state(held=prompts)}
        if groups:
            data["held"] = [{**prompts[n].to_json(), "group_index": n} for n in groups]
        return Position(data, tuple(sample for group in groups.values() for sample in group))

    def load_state(self, position: Position, keep: bool = False) -> None:
        """Inverse of ``state``: groups whose samples were kept are ready with ``keep``, else they are generated again."""
        self.ready, self.popped = [], []
        self.prompts.load_state(position.data["prompts"])
        groups: dict[int, Group] = {}
        for sample in position.samples:
            groups.setdefault(sample.group_index, []).append(sample)
        held = [Prompt.from_json(data, data["group_index"]) for data in position.data.get("held", ())]
        if keep:
            self.prompts.out |= {prompt.group_index: prompt for prompt in held}
            self.ready = [(prompt, groups[prompt.group_index]) for prompt in held]
        else:
            self.prompts.put_back(held)

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

    def _give_up_when_nothing_passes(self) -> None:
        limit = 20 * self.run.config.rollout.batch_size
        if not self.ready and self._refused >= limit:
            raise DataError(
                f"the group filter refused all of {self._refused} groups; loosen --dynamic-sampling-filter-path, use "
                "easier or harder prompts, or raise --n-samples-per-prompt"
            )


def _number(prompt: Prompt) -> int:
    return prompt.group_index
