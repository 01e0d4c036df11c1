"""Evaluation: generates and scores held-out prompts in the same way as training prompts; never trains on them.

Every evaluation uses the same random numbers, so only changed weights can change the score.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError
from miles_core.rollout.collect import by_policy, reward_parts
from miles_core.rollout.queue import Prompt, RenderRows
from miles_core.rollout.requests import FIRST_EVALUATION

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import Producer
    from miles_core.data.prompt_source import PromptSource
    from miles_core.observe.progress import Progress
    from miles_core.rollout.collect import Group


@dataclass(frozen=True)
class Evaluated:
    """Result of one evaluation: its metrics, and the scored samples by name of the data set."""

    metrics: dict[str, float]
    samples: dict[str, list[Sample]]


class Evaluator:
    """Scores the data sets of ``--eval-prompt-data``.

    Args:
        run: for configuration and hooks.
        sets: finite data sets by name; an unnamed data set has the name "".
        render: see ``RenderRows``; rows with None are skipped.
        producer: generates and scores the samples of a prompt.
        progress: display that advances with each finished group; None while it shows something else.
    """

    def __init__(
        self,
        run: Run,
        sets: dict[str, PromptSource],
        render: RenderRows,
        producer: Producer,
        progress: Progress | None,
    ) -> None:
        self.run, self.sets, self.render = run, sets, render
        self.producer, self.progress = producer, progress
        self._starts = {name: source.state() for name, source in sets.items()}

    @property
    def count(self) -> int:
        """Number of samples in one evaluation."""
        return sum(source.length or 0 for source in self.sets.values()) * self.run.config.evaluation.n_samples

    async def __call__(self) -> Evaluated:
        """Evaluate all data sets.

        The metrics are ``eval/reward`` (mean), ``eval/accuracy`` (fraction of samples with reward >= 1) and ``eval/length_mean``
        over all samples, ``eval/NAME/...`` for each named data set and, with several policies, ``POLICY/eval/...``.
        """
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        answers: dict[str, list[Sample]] = {}
        for name in self.sets:
            groups = await self._groups(name, first=FIRST_EVALUATION + len(samples))
            answers[name] = [sample for group in groups for sample in group]
            samples += answers[name]
            own = self._metrics(answers[name], f"eval/{name}" if name else "eval")
            self.run.hooks.on("on_evaluation", run=self.run, name=name, groups=groups, metrics=own)
            metrics |= own
        if set(self.sets) != {""}:
            metrics |= self._metrics(samples, "eval")
        return Evaluated(metrics, answers)

    async def _groups(self, name: str, first: int) -> list[Group]:
        source, count = self.sets[name], self.run.config.evaluation.n_samples
        source.load_state(self._starts[name])
        groups: list[Group] = []
        rows = source.next(source.length or 0)
        for number, (row, tokens) in enumerate(zip(rows, self.render(rows), strict=True)):
            if tokens is None:
                continue
            groups.append([*Prompt.of(row, tokens, number).samples(count)])
            for i, sample in enumerate(groups[-1]):
                sample.index = first + number * count + i
        if not groups:
            raise DataError(
                f"--eval-prompt-data {name}: all {len(rows)} prompts are too long or invalid (the log names them); use shorter prompts, a higher "
                "--rollout-max-prompt-len, or a model with a longer context"
            )
        return list(await asyncio.gather(*(self._complete(group) for group in groups)))

    async def _complete(self, group: Group) -> Group:
        """Generate and score one group; a failed sample has reward 0."""
        made = await self.producer.produce(group, evaluation=True)
        for sample in made:
            if sample.status is Status.FAILED:
                sample.reward = 0.0
        if self.progress is not None:
            self.progress.advance(len(group))
        return made

    def _metrics(self, samples: list[Sample], prefix: str) -> dict[str, float]:
        rewards = [s.reward_value(self.run.config.reward.reward_key) for s in samples]
        metrics = {
            f"{prefix}/reward": statistics.fmean(rewards),
            f"{prefix}/accuracy": sum(r >= 1.0 for r in rewards) / len(rewards),
            f"{prefix}/length_mean": statistics.fmean(s.response_length for s in samples),
        } | reward_parts(samples, prefix)
        for policy, own in by_policy(self.run, samples).items():
            metrics |= {f"{policy}/{name}": value for name, value in self._metrics(own, prefix).items()}
        return metrics
