"""``--verify-logprobs``: after every weight sync, engine and trainer score the same tokens.

The engine answers a few probe prompts under the weights it was just given. Its log-probabilities of what it sampled are
compared with the trainer's, computed as in training; a mean |delta| beyond the tolerance stops the run. Two checks find an
engine that serves older weights: the version it reports, and whether its scores moved. For the second, the tokens of the
sync before are scored again on both sides (an engine that can ``score``): the trainer's log-probabilities of them moved by a
vector d, and the engine's must have moved along it, however small d is compared with the mismatch itself: the
coefficient of its movement on d is near 1 when the update arrived, 0 when it did not, between when a part is missing.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.data.sample import Sample
from miles_core.errors import MismatchError
from miles_core.rollout.partial import partial_rollout
from miles_core.stash import StashKey
from miles_mismatch.budget import BUDGET_FILE, budget, in_this_process
from miles_mismatch.gap import KNOWN, Gap, LogProbs, along, measure, ordinary
from miles_mismatch.probe import bare, probe, probe_prompts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from miles_core.contracts.policy import Policy
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts

log = logging.getLogger(__name__)

#: An engine that moved by less than this part of the way did not move.
_STILL = 0.1
#: ... and where the two agreed ten times better than they moved, it must have moved so far along.
_ALMOST = 0.9
#: Below this movement of the trainer's log-probs (root mean square, nats) FP32 rounding hides the engine's.
_SMALLEST = 1e-5
#: ... and below this part of the mismatch, a low-precision engine may rightly not have moved at all.
_VISIBLE = 0.1


@dataclass
class Earlier:
    """The probe of the sync before: its samples as recorded and bare, what both sides said of those then, each by itself, and in
    which number formats they computed. ``first``: nothing was synced before it."""

    recorded: list[Sample]
    samples: list[Sample]
    trainer: LogProbs
    engine: LogProbs | None
    formats: Any
    first: bool


_PROMPTS = StashKey[Sequence[Sequence[int]]]()
_EARLIER = StashKey[dict[str, Earlier]]()


def make_check(run: Run) -> Callable[[PolicyParts], Awaitable[Mapping[str, float]]] | None:
    """The check named ``verify_logprobs``; None without ``--verify-logprobs``."""
    return partial(verify_sync, run) if run.config.run.verify_logprobs else None


async def verify_sync(run: Run, parts: PolicyParts) -> dict[str, float]:
    """Check the weights that were synced last; returns metrics.

    Raises:
        MismatchError: the engine serves other weights, or the two sides disagree by more than the tolerance.
    """
    options, policy = run.config.run, parts.policy
    check_version(parts)
    if _PROMPTS not in run.stash:
        run.stash[_PROMPTS] = probe_prompts(run)
    earlier = run.stash.setdefault(_EARLIER, {})
    last = earlier.get(policy.name)
    moved = None if last is None else await movement(run, parts, last)
    samples = await probe(run, parts, run.stash[_PROMPTS], key=policy.version * len(run.stash[_PROMPTS]))
    check_versions_of(samples, policy)
    gap = measure(_engine(samples), await parts.learner.log_probs(samples), samples, run.text)
    if gap.mean_abs > options.verify_logprobs_tolerance:
        raise MismatchError(await _sentence(run, parts, gap, options.verify_logprobs_tolerance), gap)
    older = trains_on_older(run)
    if last is None:
        await write_budget(run, parts, await probe(run, parts, run.stash[_PROMPTS], support=True))
    elif older and last.first and parts.precisions == last.formats:
        await write_budget(run, parts, last.recorded)  # of samples as old as those of most steps
    alone = [bare(s) for s in samples]
    trainer, engine = await parts.learner.log_probs(alone), await score(run, parts, alone)
    earlier[policy.name] = Earlier(samples, alone, trainer, engine, parts.precisions, first=last is None)
    if older or not in_this_process(parts.serving):  # else the engine is asked for its weights
        await parts.learner.take_snapshot(policy.version)
    return gap.metrics("verify") | ({} if moved is None else {"verify/moved": moved})


def check_version(parts: PolicyParts) -> None:
    """The engine must report the version that was synced."""
    engine, policy = parts.serving, parts.policy
    if engine.version != policy.version:
        raise MismatchError(
            f"stale weights: the engine serves version {engine.version} although version {policy.version} was synced; "
            "the weight update did not reach it (look at the transport's messages above)"
        )


def check_versions_of(samples: Sequence[Sample], policy: Policy) -> None:
    """Every token of a fresh probe must come from the version that was synced."""
    for sample in samples:
        others = [v for _, v in sample.weight_versions if v != policy.version]
        if others:
            raise MismatchError(
                f"stale weights: probe sample {sample.index} was generated with weight version {others[0]} after version "
                f"{policy.version} was synced; an engine worker did not take the update"
            )


async def score(run: Run, parts: PolicyParts, samples: Sequence[Sample]) -> list[np.ndarray] | None:
    """The engine's log-probabilities of the samples' response tokens over the whole vocabulary; None when it cannot."""
    engine, temperature = parts.serving, run.config.rollout.temperature
    needed = {"score"} if temperature == 1 else {"score", "score_temperature"}
    if not needed <= engine.capabilities:
        return None
    found = await engine.score([s.tokens for s in samples], temperature)
    return [f[s.prompt_length - 1 :] for f, s in zip(found, samples, strict=True)]


async def movement(run: Run, parts: PolicyParts, last: Earlier) -> float | None:
    """How far along the trainer's movement since ``last`` the engine moved: near 1 when it serves the update.

    None where the engine cannot score, the step was too small to see, or a side changed its number format meanwhile.

    Raises:
        MismatchError: it did not move, or too little of the way.
    """
    if parts.precisions != last.formats:
        return None
    policy = parts.policy
    engine = await score(run, parts, last.samples)
    if engine is None or last.engine is None:
        return None
    now = await parts.learner.log_probs(last.samples)
    step, change = _difference(now, last.trainer), _difference(engine, last.engine)
    kept = ordinary(change, step)  # the step must be visible on the tokens by which it is judged
    size, mismatch = _rms(step[kept]), _rms(_difference(last.engine, last.trainer)[kept])
    if size < _SMALLEST or size < _VISIBLE * mismatch:
        return None
    moved, error = along(change, step)
    # By the coefficient, as medians may be the rounding of a few tokens' last place while other tokens moved.
    still = moved + 3 * error < _STILL
    if still or (mismatch < _VISIBLE * size and moved + 3 * error < _ALMOST):
        what = "it still serves the previous weights" if still else "part of the update is missing"
        raise MismatchError(
            f"stale weights: version {policy.version} was synced and the engine reports it, but its log-probs moved only "
            f"{moved:.0%} of the way the trainer's did (median change {np.median(np.abs(change)):.2e} against "
            f"{np.median(np.abs(step)):.2e} nats over {len(step)} tokens): "
            f"{what}; look at the transport, and compare with another (--transport copy)"
        )
    return moved if error < KNOWN else None


def trains_on_older(run: Run) -> bool:
    """Whether samples are older than the weights they train: under any schedule but core's ``sync``."""
    return run.config.run.schedule != "sync" or partial_rollout(run.config)


async def write_budget(run: Run, parts: PolicyParts, samples: Sequence[Sample]) -> None:
    """Measure the budget of ``samples`` and keep it in the run directory for the report."""
    found = await budget(run, parts, samples)
    content = {"policy": parts.policy.name, "version": parts.policy.version, **found.to_dict()}
    (run.directory / BUDGET_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


async def _sentence(run: Run, parts: PolicyParts, gap: Gap, tolerance: float) -> str:
    found = await budget(run, parts, await probe(run, parts, run.stash[_PROMPTS], support=True))
    causes = ", ".join(f"{c.name} {c.share:.0%}" for c in found.ordered()[:3])
    worst = "\n  ".join(map(str, gap.worst[:4]))
    return (
        f"engine and trainer disagree by {gap.mean_abs:.3g} nats a token (mean |delta log p| over {gap.tokens} tokens, "
        f"largest {gap.max_abs:.3g}) at weight version {parts.policy.version}, beyond --verify-logprobs-tolerance "
        f"{tolerance:g}; by cause: {causes} (miles verify --budget shows more). The worst tokens:\n  {worst}"
    )


def _engine(samples: Sequence[Sample]) -> list[np.ndarray]:
    return [np.asarray(s.rollout_log_probs, np.float64) for s in samples]


def _rms(values: np.ndarray) -> float:
    return math.sqrt(float(values @ values) / max(len(values), 1))


def _difference(a: LogProbs, b: LogProbs) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64) - y for x, y in zip(a, b, strict=True)])
