"""Teachers: they score samples, and their scores are combined.

With several teachers, the student minimises the weighted sum of the divergences from each of them. For the sampled token that sum is
``log p_student - sum_i w_i log p_i`` (with weights that add up to 1), so one column holds the second term. With top-k, the columns
hold the k tokens of each teacher, one teacher after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles_core.data import Sample
from miles_core.engine import Engine
from miles_core.plugin import DataError
from miles_core.trainer import LearnerHandle


@dataclass(frozen=True)
class Score:
    """The teachers' scores of one sample.

    Attributes:
        log_probs: [response_length] float32, the weighted mean of the teachers' log-probabilities of the sampled tokens.
        tokens: [response_length, teachers * k] int32, the most probable tokens of each teacher; None without top-k.
        top_log_probs: their log-probabilities, float32 of the same shape.
    """

    log_probs: np.ndarray
    tokens: np.ndarray | None = None
    top_log_probs: np.ndarray | None = None


@dataclass(frozen=True)
class Teacher:
    """One teacher: its trainer, its engine if the engine scores, and the temperature of its log-probabilities."""

    name: str
    handle: LearnerHandle
    engine: Engine | None = None
    temperature: float = 1.0

    async def log_probs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probabilities of the response tokens, [response_length] float32 per sample; 0 where the loss mask is 0."""
        if self.engine is None:
            return await self.handle.log_probs(samples)
        media = [sample.media for sample in samples]
        scores = await self.engine.score([sample.tokens for sample in samples], self.temperature, media)
        own = [found[sample.prompt_length - 1 :] for found, sample in zip(scores, samples, strict=True)]
        return [
            np.where(np.asarray(s.mask) != 0, found, 0.0).astype(np.float32)
            for s, found in zip(samples, own, strict=True)
        ]


class Teachers:
    """All teachers of a run.

    Args:
        members: the teachers.
        weights: one weight per teacher; empty for equal ones.
        key: metadata entry of a sample with the name of its only teacher; "" if all teachers score every sample.
        k: number of most probable tokens to compare; 0 for none.
        vocabulary: number of the student's tokens.
    """

    def __init__(self, members: Sequence[Teacher], weights: Sequence[float], key: str, k: int, vocabulary: int) -> None:
        self.members = {member.name: member for member in members}
        chosen = list(weights) or [1.0] * len(members)
        self.weights = [weight / sum(chosen) for weight in chosen]
        self.key, self.k, self.vocabulary = key, k, vocabulary

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Score samples, in their order.

        Raises:
            DataError: the metadata of a sample names no teacher, or a teacher's token is not in the student's vocabulary.
        """
        if not self.key:
            columns = [await self._score_by(member, samples) for member in self.members.values()]
            return [self._combine(scores) for scores in zip(*columns, strict=True)]
        found: dict[int, Score] = {}
        chosen = [self._teacher_of(sample) for sample in samples]
        for name, member in self.members.items():
            mine = [i for i, teacher in enumerate(chosen) if teacher == name]
            if mine:
                found |= zip(mine, await self._score_by(member, [samples[i] for i in mine]), strict=True)
        return [found[i] for i in range(len(samples))]

    def _teacher_of(self, sample: Sample) -> str:
        name = sample.metadata.get(self.key)
        if name not in self.members:
            raise DataError(
                f"sample {sample.index}: its metadata names the teacher {name!r:.80} (--distillation-teacher-key {self.key}); the "
                f"teachers of this run are: {', '.join(self.members)}"
            )
        return str(name)

    async def _score_by(self, member: Teacher, samples: Sequence[Sample]) -> list[Score]:
        log_probs = await member.log_probs(samples)
        if not self.k:
            return [Score(each) for each in log_probs]
        tops = await member.handle.top_log_probs(samples, self.k)
        for top in tops:
            if top.tokens.size and int(top.tokens.max()) >= self.vocabulary:
                raise DataError(
                    f"the teacher {member.name} gives its token {int(top.tokens.max())} a high probability, and the student's model "
                    f"has {self.vocabulary} tokens: the teacher's output layer is padded; lower --distillation-top-k"
                )
        return [Score(one, top.tokens, top.log_probs) for one, top in zip(log_probs, tops, strict=True)]

    def _combine(self, scores: Sequence[Score]) -> Score:
        """Combine the scores of one sample by all teachers."""
        mean = sum(w * s.log_probs.astype(np.float64) for w, s in zip(self.weights, scores, strict=True))
        log_probs = np.asarray(mean, np.float32)
        if not self.k:
            return Score(log_probs)
        tokens = np.concatenate([s.tokens for s in scores if s.tokens is not None], axis=1)
        tops = np.concatenate([s.top_log_probs for s in scores if s.top_log_probs is not None], axis=1)
        return Score(log_probs, tokens, tops)
