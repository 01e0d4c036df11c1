"""Checks that the engine's log-probabilities of fixed tokens change between two weight syncs as the trainer's do.

The trainer's log-probabilities have moved by a vector d, and those of every engine worker must have moved along d, even if d is small compared
with the mismatch. The regression coefficient of an engine's movement on d is near 1 if the update arrived, 0 if it did not, and in between
if a part is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from miles_core.data.sample import Sample
from miles_core.errors import MismatchError
from miles_core.mismatch.gap import KNOWN, LogProbs, along, ordinary

if TYPE_CHECKING:
    from miles_core.contracts.run import Policy, Run
    from miles_core.contracts.runtime import PolicyParts

#: With a smaller coefficient, the engine counts as not updated.
_STILL = 0.1
#: Minimum coefficient if the mismatch is less than a tenth of the movement.
_ALMOST = 0.9
#: With a smaller movement of the trainer's log-probs (root mean square, nats), FP32 rounding hides the engine's movement.
_SMALLEST = 1e-5
#: With a movement below this fraction of the mismatch, the scores of a correct low-precision engine may be unchanged.
_VISIBLE = 0.1


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the same response tokens on both sides, at one sync.

    Attributes:
        samples: the samples.
        trainer: scores of the trainer, one array [response_length] per sample.
        engines: name of an engine worker ("" if there is only one) -> its scores.
        formats: number formats of both sides.
    """

    samples: Sequence[Sample]
    trainer: LogProbs
    engines: Mapping[str, LogProbs]
    formats: object

    @classmethod
    async def measure(cls, run: Run, parts: PolicyParts, samples: Sequence[Sample]) -> Scores:
        """Score ``samples`` on both sides, with an engine that ``can_score``."""
        engines = await score_each(run, parts, samples)
        return cls(samples, await parts.learner.log_probs(samples), engines, parts.precisions)

    def check_movement(self, policy: Policy, now: Scores) -> float | None:
        """Compare the movement of every engine worker since these scores with the trainer's.

        Args:
            policy: whose weights were synced.
            now: scores of the same samples after the sync.

        Returns:
            The coefficient of the worker that moved least; None if a side has changed its number format, or the step is too small to detect.

        Raises:
            MismatchError: a worker did not move, or not far enough.
        """
        if now.formats != self.formats:
            return None
        trainer = self.trainer, now.trainer
        moved = [
            _check_worker(policy, worker, trainer, (self.engines[worker], scores))
            for worker, scores in now.engines.items()
            if worker in self.engines
        ]
        return min((each for each in moved if each is not None), default=None)


def can_score(run: Run, parts: PolicyParts) -> bool:
    """Whether the engine can score given tokens at the rollout's temperature."""
    needed = {"score"} if run.config.rollout.temperature == 1 else {"score", "score_temperature"}
    return needed <= parts.serving.capabilities


async def score_each(run: Run, parts: PolicyParts, samples: Sequence[Sample]) -> dict[str, list[np.ndarray]]:
    """Return the log-probabilities of the response tokens over the full vocabulary: worker name ("" without workers) -> one array per sample."""
    sequences, media = [s.tokens for s in samples], [s.media for s in samples]
    found = await parts.serving.score_each(sequences, run.config.rollout.temperature, media)
    return {
        worker: [row[s.prompt_length - 1 :] for row, s in zip(scores, samples, strict=True)]
        for worker, scores in found.items()
    }


def _check_worker(
    policy: Policy, worker: str, trainer: tuple[LogProbs, LogProbs], engine: tuple[LogProbs, LogProbs]
) -> float | None:
    """Return the coefficient of one worker, see ``Scores.check_movement``. trainer, engine: log-probabilities at the earlier sync, and now."""
    step, change = _difference(trainer[1], trainer[0]), _difference(engine[1], engine[0])
    kept = ordinary(change, step)  # the step must be detectable on the tokens that are used
    size, mismatch = _rms(step[kept]), _rms(_difference(engine[0], trainer[0])[kept])
    if size < _SMALLEST or size < _VISIBLE * mismatch:
        return None
    moved, error = along(change, step)
    # Use the coefficient: medians may reflect rounding in the last place while other tokens moved.
    still = moved + 3 * error < _STILL
    if still and size < mismatch and _rms(change[kept]) > size / 2:
        return None  # both movements are rounding, as after a small step of a model whose rounding changes the choice of experts
    if still or (mismatch < _VISIBLE * size and moved + 3 * error < _ALMOST):
        what = "it still serves the previous weights" if still else "part of the update is missing"
        raise MismatchError(
            f"stale weights: version {policy.version} was synced and the engine{f' ({worker})' if worker else ''} reports it, but its "
            f"log-probs moved only "
            f"{moved:.0%} of the way the trainer's did (median change {np.median(np.abs(change)):.2e} against "
            f"{np.median(np.abs(step)):.2e} nats over {len(step)} tokens): "
            f"{what}; look at the transport, and compare with another (--transport copy)"
        )
    return moved if error < KNOWN else None


def _rms(values: np.ndarray) -> float:
    return math.sqrt(float(values @ values) / max(len(values), 1))


def _difference(a: LogProbs, b: LogProbs) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64) - y for x, y in zip(a, b, strict=True)])
