"""Evaluation: held-out prompts through the same generation and reward, never trained on.

Every evaluation uses the same random numbers, so a change of the score is a change of the weights.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.data.sample import Sample, Status
from miles_core.rollout.queue import Prompt
from miles_core.rollout.summary import reward_parts

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.data.prompts import Prompts
    from miles_core.observe.progress import Progress
    from miles_core.rollout.collect import Group, Score
    from miles_core.rollout.generate import Generate

#: Evaluation samples are numbered from here, so that they share no random number with training samples.
FIRST_INDEX = 1 << 40


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: its metrics, and the answers by data set."""

    metrics: dict[str, float]
    samples: dict[str, list[Sample]]


class Evaluator:
    """Scores the data sets of ``--eval-prompt-data``.

    Args:
        run: for configuration and rendering.
        sets: the data sets by name; the one without a name has the empty one.
        generate, score: as in training, with evaluation's sampling parameters.
        progress: told about every finished group; None when it shows something else meanwhile.
    """

    def __init__(
        self, run: Run, sets: dict[str, Prompts], generate: Generate, score: Score, progress: Progress | None
    ) -> None:
        self.run, self.sets = run, sets
        self.generate, self.score, self.progress = generate, score, progress

    @property
    def count(self) -> int:
        """Samples of one evaluation."""
        return sum(map(len, self.sets.values())) * self.run.config.evaluation.n_samples

    async def __call__(self) -> Evaluated:
        """``eval/reward`` (mean over samples), ``eval/accuracy`` (fraction with reward >= 1) and ``eval/length_mean`` over
        all samples, and ``eval/NAME/...`` for each named data set."""
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        answers: dict[str, list[Sample]] = {}
        for name, source in self.sets.items():
            answers[name] = found = await self._samples(source, first=FIRST_INDEX + len(samples))
            samples += found
            if name:
                metrics |= self._metrics(found, f"eval/{name}")
        return Evaluated(self._metrics(samples, "eval") | metrics, answers)

    async def _samples(self, source: Prompts, first: int) -> list[Sample]:
        groups: list[Group] = []
        count = self.run.config.evaluation.n_samples
        for number, row in enumerate(source):
            prompt = Prompt(row.prompt, tuple(self.run.render(row.prompt)), row.label, dict(row.metadata), number)
            samples = prompt.samples(count)
            for i, sample in enumerate(samples):
                sample.index = first + number * count + i
            groups.append(samples)
        done = await asyncio.gather(*(self._one(group) for group in groups))
        return [sample for group in done for sample in group]

    async def _one(self, group: Group) -> Group:
        made = [s for siblings in await asyncio.gather(*(self.generate(s) for s in group)) for s in siblings]
        for sample in made:
            if sample.status is Status.FAILED:
                sample.reward = 0.0
        await self.score(made)
        if self.progress is not None:
            self.progress.advance(len(group))
        return made

    def _metrics(self, samples: list[Sample], prefix: str) -> dict[str, float]:
        rewards = [s.reward_value(self.run.config.reward.reward_key) for s in samples]
        return {
            f"{prefix}/reward": statistics.fmean(rewards),
            f"{prefix}/accuracy": sum(r >= 1.0 for r in rewards) / len(rewards),
            f"{prefix}/length_mean": statistics.fmean(s.response_length for s in samples),
        } | reward_parts(samples, prefix)
