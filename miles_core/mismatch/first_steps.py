"""Checks in the first steps that the engine samples from the trained distribution. The comparison after the first sync scores given text.
Samples also pass through the sampler, its options, the decode kernels, the cache
and the scheduler, so the first samples of a run are compared with the trainer before it trains on them: the log-probabilities that the
engine recorded, against those of a verification pass with the same weights.

Only samples that were generated with exactly the trainer's weights are compared, so staleness has no influence; recorded routes and
supports are used as in training; a verification pass has no dropout and no capacity of experts. A difference counts as at most
``MOST`` nats, so the few tokens with other experts have little influence. If half of all differences stay within the median that the
declared precisions explain, the mean of ordinary rounding errors stays within 1.5 times that: this is the bound
(``first_step_bound``), which a line of the plan shows (``planned``).
The run stops at its first step if the mean exceeds the bound by more than chance explains, and at the latest if the median over
three steps exceeds it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from miles_core.data.sample import Sample
from miles_core.errors import MismatchError
from miles_core.mismatch.scorer import precisions
from miles_core.mismatch.tolerance import Side, first_step_bound

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts

log = logging.getLogger(__name__)

#: Largest difference of a token, in nats.
MOST = 1.0
#: Number of steps after which the median decides.
STEPS = 3
#: Number of samples and of tokens, prompts included, that are compared at most; at least one sample is.
SAMPLES, TOKENS = 32, 1 << 15
#: Standard errors by which a single step has to exceed the bound.
_CHANCE = 3.0


def make_check(run: Run, parts: PolicyParts) -> Callable[[Sequence[Sample]], Awaitable[None]] | None:
    """Create the check of the samples that a policy is about to train on; None with ``--no-self-check``, and for critics."""
    checks = run.config.model.self_check and parts.engine is not None and parts.policy.role == "train"
    return FirstSteps(run, parts) if checks else None


class FirstSteps:
    """Compares the samples of the first steps of a policy, until there is a result for each pair of precisions."""

    def __init__(self, run: Run, parts: PolicyParts) -> None:
        self._run, self._parts = run, parts
        self._means: dict[object, list[float]] = {}
        self._done: set[object] = set()

    async def __call__(self, samples: Sequence[Sample]) -> None:
        """Compare the samples of a step with the trainer.

        Raises:
            MismatchError: engine and trainer differ by more than their precisions explain.
        """
        parts = self._parts
        key = parts.precisions
        if key in self._done:
            return
        version = parts.policy.version
        stamped = not self._run.config.trains_on_older  # engines without versions of tokens: all are current
        pairs = [(s, m) for s in samples if (m := find_current(s, version, stamped)) is not None]
        chosen = _choose(pairs)
        if not chosen:
            return
        trainer = await parts.learner.log_probs([sample for sample, _ in chosen])
        found = np.concatenate([measure(s, t, mask) for (s, mask), t in zip(chosen, trainer, strict=True)])
        means = self._means.setdefault(key, [])
        means.append(float(found.mean()))
        declared = precisions(self._run, parts)
        bound = first_step_bound(*declared)
        chance = _CHANCE * float(found.std()) / math.sqrt(len(found))
        beyond = means[-1] - chance > bound or (len(means) == STEPS and median(means) > bound)
        if beyond:
            self._report(means, len(found), bound, declared)
        elif means[-1] <= bound:
            log.info(
                "samples of step %d: engine and trainer differ by %.2g nats (bound %.2g)",
                self._run.step + 1,
                means[-1],
                bound,
            )
        if beyond or len(means) == STEPS or (len(means) == 1 and means[0] <= bound):
            self._done.add(key)

    def _report(self, means: Sequence[float], tokens: int, bound: float, declared: tuple[Side, Side]) -> None:
        run, parts, step = self._run, self._parts, self._run.step + 1
        of_policy = f" of policy {parts.policy.name}" if len(run.policies) > 1 else ""
        several = f" (median {median(means):.3g} over {len(means)} steps)" if len(means) > 1 else ""
        message = (
            f"the engine {run.config.run.engine} did not sample from the distribution that the trainer {run.config.run.trainer}{of_policy} "
            f"computes: over {tokens} tokens of step {step}, sampled with the trainer's own weights (version {parts.policy.version}), they "
            f"differ by {means[-1]:.3g} nats per token on average{several}, and the precisions (engine {declared[0]}; trainer {declared[1]}) "
            f"explain {bound:.2g}. Scores of given text agreed after the sync, so look at what applies to generated tokens only: sampling "
            "options that are applied twice or on one side, logits processors, decode kernels, cached keys and positions; "
            "miles verify --budget divides the difference by cause; --allow-mismatch trains anyway"
        )
        if not run.config.run.allow_mismatch:
            raise MismatchError(message)
        log.warning("%s (--allow-mismatch was given)", message)


def find_current(sample: Sample, version: int, unstamped: bool) -> np.ndarray | None:
    """Return the loss mask, bool [response_length], of a sample that was generated with the weights ``version`` only; None for others. A
    sample that was continued with newer weights may keep cached keys of the older ones.

    Args:
        sample: a sample of a step.
        version: the trainer's weights.
        unstamped: whether samples without recorded versions count as current.
    """
    if sample.rollout_log_probs is None or len(sample.rollout_log_probs) != sample.response_length:
        return None
    current = unstamped if not sample.weight_versions else {stamp for _, stamp in sample.weight_versions} == {version}
    mask = np.asarray(sample.mask, bool)
    return mask if current and mask.any() else None


def measure(sample: Sample, trainer: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the absolute differences of both sides over the tokens in ``mask``, at most ``MOST``, which also stands for NaN."""
    engine = np.asarray(sample.rollout_log_probs, np.float64)[mask]
    delta = np.abs(engine - np.asarray(trainer, np.float64)[mask])
    return np.where(delta < MOST, delta, MOST)


def _choose(pairs: Sequence[tuple[Sample, np.ndarray]]) -> list[tuple[Sample, np.ndarray]]:
    """Return some of the samples, evenly spaced."""
    chosen: list[tuple[Sample, np.ndarray]] = []
    tokens = 0
    for sample, mask in pairs[:: max(-(-len(pairs) // SAMPLES), 1)]:
        tokens += len(sample.tokens)
        if chosen and tokens > TOKENS:
            break
        chosen.append((sample, mask))
    return chosen
