"""Scores probes with the trainer: in its own precision, imitating the engine's number format, and in a wider type (the reference)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from miles_core.contracts.emulation import AS_TRAINED, Emulation
from miles_core.data.sample import Sample
from miles_core.errors import MilesError
from miles_core.mismatch.tolerance import FLOOR, Side, expected_scale, find_dtype
from miles_core.precision.schedule import PLAIN
from miles_core.sync.push import make_codec

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import LearnerHandle, PolicyParts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """Scores of the reference, one array [response_length] per sample.

    Attributes:
        scores: log-probabilities; None if the trainer has no wider type.
        entropies: entropies of the distributions, ``gaps``: how much more likely the most likely token is, in nats; None if the trainer
            does not compute them.
    """

    scores: list[np.ndarray] | None
    entropies: list[np.ndarray] | None
    gaps: list[np.ndarray] | None


@dataclass(frozen=True)
class Scorer:
    """Scores probes with the trainer of a policy.

    Attributes:
        learner: the trainer. emulation: switches that imitate the engine. wider: whether it can compute in a wider type. columns: computed
        columns besides log-probabilities. declared: precisions of engine and trainer, as far as they differ after imitation.
    """

    learner: LearnerHandle
    emulation: Emulation
    wider: bool
    columns: tuple[str, ...]
    declared: tuple[Side, Side]

    @property
    def scale(self) -> float:
        """Scale of the errors that the declared precisions explain."""
        return expected_scale(*self.declared)

    @property
    def floor(self) -> float:
        """Size of errors that are never judged: a single input that moves to the next code of a format changes many tokens after it."""
        return FLOOR + self.declared[0].tipped

    @classmethod
    async def make(cls, run: Run, parts: PolicyParts) -> Scorer:
        """Determine the trainer's capabilities by scoring two tokens."""
        learner, (engine, trainer) = parts.learner, precisions(run, parts)
        tiny = [Sample(tokens=[0, 0], response_length=1, index=0, group_index=0)]
        emulation, why = AS_TRAINED, f"the trainer computes in {trainer.format} and the engine in {engine.format}"
        if trainer.format in (PLAIN, engine.format):
            imitation = imitate_engine(engine, trainer)
            why = await _attempt(learner, tiny, (), imitation)
            if not why:
                emulation, trainer = imitation, replace(engine, dtype=trainer.dtype)
                why = await _attempt(learner, tiny, (), replace(emulation, wider=True))
        if why:
            log.info(
                "trainer %s has no reference in a wider type (%s): it is compared with the engine within what the declared precisions "
                "explain (engine %s; trainer %s)",
                run.config.run.trainer,
                why,
                engine,
                trainer,
            )
        columns = [("entropy",), ("top_tokens", "top_log_probs")]
        computed = [names for names in columns if not await _attempt(learner, tiny, names, emulation)]
        return cls(learner, emulation, not why, tuple(n for names in computed for n in names), (engine, trainer))

    def describe(self) -> str:
        """Describe the reference for the errors of the engine."""
        engine, trainer = self.declared
        if self.wider:
            return f"The reference is the trainer's model computed in a wider type, and rounding is what the trainer's errors in {trainer} are"
        return f"The precisions (engine {engine}; trainer {trainer}) do not explain that"

    async def score(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Compute the trainer's log-probabilities in its own type, one array [response_length] per sample."""
        return await self.learner.log_probs(samples, self.emulation)

    async def refer(self, samples: Sequence[Sample]) -> Reference:
        """Score ``samples`` in the wider type if there is one, otherwise in the trainer's own."""
        emulation = replace(self.emulation, wider=self.wider)
        rows = await self.learner.columns(samples, "verify", ("log_probs", *self.columns), 1, emulation)
        return Reference(
            [row["log_probs"] for row in rows] if self.wider else None,
            [row["entropy"] for row in rows] if "entropy" in self.columns else None,
            [row["top_log_probs"][:, 0] - row["log_probs"] for row in rows]
            if "top_log_probs" in self.columns
            else None,
        )


async def _attempt(
    learner: LearnerHandle, samples: Sequence[Sample], names: Sequence[str], emulation: Emulation
) -> str:
    """Return why the trainer cannot compute columns with an emulation; "" if it can."""
    try:
        await learner.columns(samples, "verify", ("log_probs", *names), int("top_tokens" in names), emulation)
    except MilesError as error:
        return str(error)
    return ""


def imitate_engine(engine: Side, trainer: Side) -> Emulation:
    """Return the emulation with which a trainer computes in the engine's precision, if it computes in no other number format."""
    differs = engine.format != trainer.format
    return Emulation(encoded=differs, activations=differs and engine.rounds_inputs, kv_dtype=engine.cache)


def precisions(run: Run, parts: PolicyParts) -> tuple[Side, Side]:
    """Return the declared precisions of a policy's engine and trainer."""
    dtype = find_dtype(run.plan.fact)
    now = parts.precisions
    return (
        _side(run, parts, dtype, now.rollout, parts.serving.kv_cache_dtype),
        _side(run, parts, dtype, now.train, ""),
    )


def _side(run: Run, parts: PolicyParts, dtype: str, precision: str, cache: str) -> Side:
    if precision == PLAIN:
        return Side(dtype, cache=cache)
    format = make_codec(run, parts.policy, precision).format
    assert format is not None  # the name of a format
    return Side(dtype, format.name, format.error, format.quantizes_activations, cache)
