"""Collects groups of samples for a training step: sends prompts, scores and filters finished groups, and orders them."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.contracts.schedule import Position
from miles_core.data.batch import means
from miles_core.data.sample import Sample, Status, number, reward_values
from miles_core.errors import DataError
from miles_core.observe.progress import Progress
from miles_core.reward.reward import RewardFunction, apply_rule, score
from miles_core.rollout.continuation import partial_rollout
from miles_core.rollout.queue import Prompt, PromptQueue

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import Producer

log = logging.getLogger(__name__)

Group = list[Sample]
Rollout = Callable[[int], Awaitable[list[Group]]]


#: Interval in seconds at which a stop request is checked while no group finishes (a slow tool, a slow judge).
PATIENCE = 0.5

#: The run stops after this many consecutive groups whose samples all failed.
FAILED_GROUPS = 20


#: Attributes of an enum class are found by a call, which takes longer than the comparison.
FAILED, ABORTED, TRUNCATED = Status.FAILED, Status.ABORTED, Status.TRUNCATED


class Interrupted(Exception):
    """Raised if the user requests a stop during a rollout or the warm start, whose partial result is discarded."""


class Collector:
    """Produces groups of samples. The schedule decides when, and how many groups are in flight.

    Args:
        run: for the configuration and stop requests.
        prompts: supplies prompts; unused prompts are put back.
        producer: generates and scores groups.
        progress: display that advances with each finished group.
        accept: group filter, or None to accept every group.

    Attributes:
        pending: task of each group in flight -> its prompt.
        ready: finished groups that passed the filter.
        popped: prompts of the groups returned by ``pop`` and ``take_out``, until ``mark_used``.
    """

    def __init__(
        self,
        run: Run,
        prompts: PromptQueue,
        producer: Producer,
        progress: Progress,
        accept: Callable[[Any, Group], bool] | None = None,
    ) -> None:
        self.run, self.prompts, self.producer, self.progress, self.accept = run, prompts, producer, progress, accept
        self.pending: dict[asyncio.Task[Group], Prompt] = {}
        self.ready: list[tuple[Prompt, Group]] = []
        self.popped: list[Prompt] = []
        self._refused = self._failed = 0
        self._news = asyncio.Event()
        self._done: list[asyncio.Task[Group]] = []

    async def rollout(self, step: int) -> list[Group]:
        """Collect ``--rollout-batch-size`` groups that pass the filter, ordered by group number.

        Starts with ``--over-sampling-batch-size`` prompts in flight and sends more as the filter rejects groups. When enough
        groups are accepted, the remaining ones are aborted and their prompts return to the front of the queue. With
        ``--partial-rollout`` they stay in flight instead, and surplus finished groups wait for the next collection.
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
            task.add_done_callback(self._finish)
            self.pending[task] = prompt

    def _finish(self, task: asyncio.Task[Group]) -> None:
        self._done.append(task)
        self._news.set()

    async def advance(self) -> None:
        """Wait until a group in flight finishes, at most ``PATIENCE`` seconds, and add the accepted groups to ``ready``.

        Raises:
            Interrupted: the user requested a stop.
            DataError: the filter rejected, or the rollout function failed on, too many groups in succession.
        """
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
            self._failed = 0 if group else self._failed + 1
            if not group:
                self.prompts.mark_used([prompt])
                self._check_samples_succeed(prompt)
            elif self.accept is None or self.accept(self.run.config.args, group):
                self.ready.append((prompt, group))
            else:
                self.prompts.mark_used([prompt])
                self._refused += 1
                self._check_filter_accepts()

    def pop(self, count: int) -> list[Group]:
        """Remove and return the ``count`` ready groups with the lowest numbers."""
        self._refused = 0
        self.ready.sort(key=lambda item: item[0].group_index)
        return self.take_out([prompt.group_index for prompt, _ in self.ready[:count]])

    def take_out(self, numbers: Collection[int]) -> list[Group]:
        """Remove and return the ready groups with these numbers."""
        wanted = set(numbers)
        taken = [item for item in self.ready if item[0].group_index in wanted]
        self.ready = [item for item in self.ready if item[0].group_index not in wanted]
        self.popped += [prompt for prompt, _ in taken]
        return [group for _, group in taken]

    def mark_used(self) -> None:
        """Mark the prompts of all groups returned so far as used: a step trains on them."""
        self.prompts.mark_used(self.popped)
        self.popped = []

    async def drop(self) -> None:
        """Abort the groups in flight and discard the ready ones. Their prompts return to the front of the queue."""
        if self.pending:
            gone, self.pending = self.pending, {}
            for task in gone:
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            count = self.run.config.rollout.n_samples_per_prompt
            await self.producer.abort([index for prompt in gone.values() for index in prompt.indexes(count)])
            self.prompts.put_back(sorted(gone.values(), key=lambda prompt: prompt.group_index))
        left, self.ready = [prompt for prompt, _ in self.ready], []
        self.prompts.put_back(sorted(left, key=lambda prompt: prompt.group_index))

    def metrics(self) -> dict[str, float]:
        """Return the means of request and rollout statistics since the last call: ``engine/NAME`` (from ``Response.metrics``) and the
        metrics of rollout functions."""
        values = means(self.producer.answers)
        self.producer.answers.clear()
        return values

    def state(self, taken: Sequence[Group] = ()) -> Position:
        """Return the state for a checkpoint. It holds the samples of ready groups and of ``taken`` groups (returned, but not
        trained on yet); all other prompts in use are generated again after a resume."""
        prompts = {p.group_index: p for p in (*self.popped, *(prompt for prompt, _ in self.ready))}
        groups = {g[0].group_index: g for g in (*taken, *(group for _, group in self.ready)) if g}
        data: dict[str, Any] = {"prompts": self.prompts.state(held=prompts)}
        if groups:
            data["held"] = [{**prompts[n].to_json(), "group_index": n} for n in groups]
        return Position(data, tuple(sample for group in groups.values() for sample in group))

    def load_state(self, position: Position, keep: bool = False) -> None:
        """Inverse of ``state``. With ``keep``, saved groups become ready; otherwise their prompts are generated again."""
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

    async def _group(self, samples: Sequence[Sample]) -> Group:
        """Generate and score one group. The result lacks the samples that failed; it is empty if all of them did."""
        group = await self.producer.produce(samples)
        self.progress.advance(len(group))
        return remove_failed(group)

    def _check_samples_succeed(self, prompt: Prompt) -> None:
        """Raise DataError if every sample of the last ``FAILED_GROUPS`` groups failed."""
        log.warning("every sample of group %d failed; another prompt replaces it", prompt.group_index)
        if self._failed >= FAILED_GROUPS:
            raise DataError(
                f"every sample of the last {FAILED_GROUPS} groups failed, most recently of group {prompt.group_index}; see run.log for "
                "the errors of tools, environments or agents"
            )

    def _check_filter_accepts(self) -> None:
        """Raise DataError if the filter rejected 20 batches of groups and accepted none."""
        limit = 20 * self.run.config.rollout.batch_size
        if not self.ready and self._refused >= limit:
            raise DataError(
                f"the group filter refused all of the last {self._refused} groups; loosen --dynamic-sampling-filter-path, use "
                "easier or harder prompts, or raise --n-samples-per-prompt"
            )


class Scorer:
    """Rewards samples.

    Args:
        run: provides the policies and the options that reward functions receive.
        reward: the reward function of all samples.
        reward_of: policy name -> the reward function of its samples; empty if ``reward`` scores all.

    Attributes:
        by_sample: whether samples of a group may be scored separately.
    """

    def __init__(self, run: Run, reward: RewardFunction, reward_of: Mapping[str, RewardFunction]) -> None:
        self.run, self.reward, self.reward_of = run, reward, reward_of
        self.by_sample = all(function.scope == "sample" for function in (reward_of.values() if reward_of else [reward]))
        self._options = run.config.args

    def start(self, samples: list[Sample], evaluation: bool = False) -> Coroutine[Any, Any, None] | None:
        """Set rewards as a call does: at once, which returns None, if a rule computes them, otherwise in the returned coroutine."""
        if self.reward_of or self.reward.rule is None:
            return self(samples, evaluation)
        apply_rule(self._find_usable(samples, evaluation), self.reward, self._options)
        return None

    async def __call__(self, samples: list[Sample], evaluation: bool = False) -> None:
        """Set the rewards of samples of one group that did not fail, of all of them unless ``by_sample``. If one was aborted, only an
        ``evaluation`` scores them."""
        usable = self._find_usable(samples, evaluation)
        if not usable:
            return
        if not self.reward_of:
            await score(usable, self.reward, self._options)
            return
        for policy in self.run.policies:
            if policy.role == "train" and (mine := self.run.select_policy(policy, [usable])):
                await score(mine, self.reward_of[policy.name], self._options)

    def _find_usable(self, samples: list[Sample], evaluation: bool) -> list[Sample]:
        usable = remove_failed(samples)
        return usable if evaluation or not any(s.status is ABORTED for s in usable) else []


def remove_failed(samples: Iterable[Sample]) -> list[Sample]:
    """Return the samples that did not fail."""
    return [s for s in samples if s.status is not FAILED]


def rollout_metrics(run: Run, groups: list[Group]) -> dict[str, float]:
    """Return statistics of rewards, response lengths and truncation.

    ``reward/all_equal`` is the fraction of groups whose rewards are all equal (no learning signal). ``reward/part/NAME`` is the
    mean of the entry NAME of dict rewards. If the groups contain samples of several policies, the result also has
    ``POLICY/reward/...`` and ``POLICY/rollout/...``.
    """
    samples = [s for group in groups for s in group]
    metrics = _metrics(run, groups, samples)
    for policy, own in by_policy(run, samples).items():
        theirs = [[s for s in group if policy_of(run, s) == policy] for group in groups]
        metrics |= {f"{policy}/{k}": v for k, v in _metrics(run, [g for g in theirs if g], own).items()}
    return metrics


def policy_of(run: Run, sample: Sample) -> str:
    """Return the name of the policy that generated a sample."""
    return sample.policy or run.policy.name


def by_policy(run: Run, samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Group samples by policy name. The result is empty if all samples belong to a single policy."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples if len(run.policies) > 1 else ():
        groups.setdefault(policy_of(run, sample), []).append(sample)
    return groups if len(groups) > 1 else {}


def _metrics(run: Run, groups: list[Group], samples: list[Sample]) -> dict[str, float]:
    key = run.config.reward.reward_key
    rewards = np.array(reward_values(samples, key))
    starts = np.cumsum([0, *filter(None, map(len, groups))])[:-1]
    equal = np.maximum.reduceat(rewards, starts) == np.minimum.reduceat(rewards, starts)
    lengths = [s.response_length for s in samples]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": float((rewards - rewards[0]).std()),  # exactly 0 if all are equal
        "reward/all_equal": int(equal.sum()) / len(groups),
        "reward/max": float(rewards.max()),
        "reward/min": float(rewards.min()),
        "rollout/length_mean": statistics.fmean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated": sum([s.status is TRUNCATED for s in samples]) / len(samples),
        "rollout/samples": float(len(samples)),
        "rollout/tokens": float(sum(lengths)),
    } | reward_parts(samples, "reward")


def reward_parts(samples: Iterable[Sample], prefix: str) -> dict[str, float]:
    """Return ``PREFIX/part/NAME`` for each numeric entry of dict rewards: its mean over the samples that have the entry."""
    parts: dict[str, list[float]] = {}
    rewards = [sample.reward for sample in samples]
    for reward in rewards if {*map(type, rewards)} != {float} else ():
        for name, value in reward.items() if isinstance(reward, Mapping) else ():
            with suppress(DataError):
                parts.setdefault(str(name), []).append(number(value, None))
    return {f"{prefix}/part/{name}": statistics.fmean(values) for name, values in parts.items() if values}
