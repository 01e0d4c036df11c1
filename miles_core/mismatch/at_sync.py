"""``--verify-logprobs``: after every weight sync, engine and trainer score the same tokens.

The engine generates responses to a few probe prompts with its new weights. Its log-probabilities of the sampled tokens are compared
with the trainer's, computed as in training; a mean |delta| above the tolerance stops the run. Two checks detect an engine that serves
older weights: the reported version, and the movement of its scores. For the second check, the tokens of the previous sync are scored
again on both sides (if the engine supports ``score``). The trainer's log-probabilities have moved by a vector d, and the engine's must
have moved along d, even if d is small compared with the mismatch. The regression coefficient of the engine's movement on d is near 1
if the update arrived, 0 if it did not, and in between if a part is missing.
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

from miles_core.contracts.run import StateKey
from miles_core.data.sample import Sample
from miles_core.errors import MismatchError
from miles_core.mismatch.budget import BUDGET_FILE, budget, in_this_process
from miles_core.mismatch.gap import KNOWN, Gap, LogProbs, along, measure, ordinary
from miles_core.mismatch.probe import ProbePrompt, bare, probe, probe_prompts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from miles_core.contracts.run import Policy, Run
    from miles_core.contracts.runtime import PolicyParts

log = logging.getLogger(__name__)

#: With a smaller coefficient, the engine counts as not updated.
_STILL = 0.1
#: Minimum coefficient if the mismatch is less than a tenth of the movement.
_ALMOST = 0.9
#: With a smaller movement of the trainer's log-probs (root mean square, nats), FP32 rounding hides the engine's movement.
_SMALLEST = 1e-5
#: With a movement below this fraction of the mismatch, the scores of a correct low-precision engine may be unchanged.
_VISIBLE = 0.1


@dataclass
class Earlier:
    """The probe of the previous sync: its samples with and without recorded fields, the scores of both sides computed independently, and
    their number formats. ``first``: True if it was the first sync."""

    recorded: list[Sample]
    samples: list[Sample]
    trainer: LogProbs
    engine: LogProbs | None
    formats: Any
    first: bool


_PROMPTS = StateKey[Sequence[ProbePrompt]]()
_EARLIER = StateKey[dict[str, Earlier]]()


def make_check(run: Run) -> Callable[[PolicyParts], Awaitable[Mapping[str, float]]] | None:
    """Create the check named ``verify_logprobs``; None without ``--verify-logprobs``."""
    return partial(verify_sync, run) if run.config.run.verify_logprobs else None


async def verify_sync(run: Run, parts: PolicyParts) -> dict[str, float]:
    """Check the last sync and return metrics.

    Raises:
        MismatchError: the engine serves other weights, or the gap between both sides exceeds the tolerance.
    """
    options, policy = run.config.run, parts.policy
    check_version(parts)
    if _PROMPTS not in run.state:
        run.state[_PROMPTS] = probe_prompts(run)
    earlier = run.state.setdefault(_EARLIER, {})
    last = earlier.get(policy.name)
    moved = None if last is None else await movement(run, parts, last)
    samples = await probe(run, parts, run.state[_PROMPTS], key=policy.version * len(run.state[_PROMPTS]))
    check_versions_of(samples, policy)
    gap = measure(_engine(samples), await parts.learner.log_probs(samples), samples, run.decode)
    if gap.mean_abs > options.verify_logprobs_tolerance:
        raise MismatchError(await _sentence(run, parts, gap, options.verify_logprobs_tolerance), gap)
    older = run.config.trains_on_older
    if last is None:
        await write_budget(run, parts, await probe(run, parts, run.state[_PROMPTS], support=True))
    elif older and last.first and parts.precisions == last.formats:
        await write_budget(run, parts, last.recorded)  # the age of these samples is typical of most steps
    alone = [bare(s) for s in samples]
    trainer, engine = await parts.learner.log_probs(alone), await score(run, parts, alone)
    earlier[policy.name] = Earlier(samples, alone, trainer, engine, parts.precisions, first=last is None)
    if older or not in_this_process(parts.serving):  # otherwise the engine's weights can be read
        await parts.learner.take_snapshot(policy.version)
    return gap.metrics("verify") | ({} if moved is None else {"verify/moved": moved})


def check_version(parts: PolicyParts) -> None:
    """Raise MismatchError unless the engine reports the synced version."""
    engine, policy = parts.serving, parts.policy
    if engine.version != policy.version:
        raise MismatchError(
            f"stale weights: the engine serves version {engine.version} although version {policy.version} was synced; "
            "the weight update did not reach it (see the transport's messages above)"
        )


def check_versions_of(samples: Sequence[Sample], policy: Policy) -> None:
    """Raise MismatchError unless every token of a new probe comes from the synced version."""
    for sample in samples:
        others = [v for _, v in sample.weight_versions if v != policy.version]
        if others:
            raise MismatchError(
                f"stale weights: probe sample {sample.index} was generated with weight version {others[0]} after version "
                f"{policy.version} was synced; an engine worker did not apply the update"
            )


async def score(run: Run, parts: PolicyParts, samples: Sequence[Sample]) -> list[np.ndarray] | None:
    """Return the engine's log-probabilities of the response tokens over the full vocabulary; None if it does not support ``score``."""
    engine, temperature = parts.serving, run.config.rollout.temperature
    if not _can_score(run, parts):
        return None
    media = [s.media for s in samples]
    return _select_responses(await engine.score([s.tokens for s in samples], temperature, media), samples)


async def score_each(run: Run, parts: PolicyParts, samples: Sequence[Sample]) -> Mapping[str, list[np.ndarray]] | None:
    """Call ``score`` on every engine worker: worker name ("" without workers) -> log-probabilities."""
    if not _can_score(run, parts):
        return None
    tokens, media = [s.tokens for s in samples], [s.media for s in samples]
    found = await parts.serving.score_each(tokens, run.config.rollout.temperature, media)
    return {worker: _select_responses(scores, samples) for worker, scores in found.items()}


def _can_score(run: Run, parts: PolicyParts) -> bool:
    needed = {"score"} if run.config.rollout.temperature == 1 else {"score", "score_temperature"}
    return needed <= parts.serving.capabilities


def _select_responses(scores: Sequence[np.ndarray], samples: Sequence[Sample]) -> list[np.ndarray]:
    return [f[s.prompt_length - 1 :] for f, s in zip(scores, samples, strict=True)]


async def movement(run: Run, parts: PolicyParts, last: Earlier) -> float | None:
    """Call ``check_movement`` with the scores of the previous probe; None if the engine cannot score, or a side has changed its number
    format."""
    if parts.precisions != last.formats:
        return None
    engine = await score(run, parts, last.samples)
    if engine is None or last.engine is None:
        return None
    now = await parts.learner.log_probs(last.samples)
    return check_movement(parts.policy, "", (last.trainer, now), (last.engine, engine))


def check_movement(
    policy: Policy, worker: str, trainer: tuple[LogProbs, LogProbs], engine: tuple[LogProbs, LogProbs]
) -> float | None:
    """Return the coefficient of the engine's movement on the trainer's between two syncs; it is near 1 if the engine serves the update.

    Args:
        policy: whose weights were synced.
        worker: name of the engine's process; "" if there is only one.
        trainer, engine: log-probabilities of the same tokens at the earlier sync and now.

    Returns:
        None if the step is too small to detect.

    Raises:
        MismatchError: the engine did not move, or not far enough.
    """
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


async def write_budget(run: Run, parts: PolicyParts, samples: Sequence[Sample]) -> None:
    """Measure the budget of ``samples`` and save it in the run directory for the report."""
    found = await budget(run, parts, samples)
    content = {"policy": parts.policy.name, "version": parts.policy.version, **found.to_dict()}
    (run.directory / BUDGET_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


async def _sentence(run: Run, parts: PolicyParts, gap: Gap, tolerance: float) -> str:
    found = await budget(run, parts, await probe(run, parts, run.state[_PROMPTS], support=True))
    causes = ", ".join(f"{c.name} {c.share:.0%}" for c in found.ordered()[:3])
    worst = "\n  ".join(map(str, gap.worst[:4]))
    return (
        f"engine and trainer disagree by {gap.mean_abs:.3g} nats per token (mean |delta log p| over {gap.tokens} tokens, "
        f"largest {gap.max_abs:.3g}) at weight version {parts.policy.version}, beyond --verify-logprobs-tolerance "
        f"{tolerance:g}; by cause: {causes} (miles verify --budget shows more). The worst tokens:\n  {worst}"
    )


def _engine(samples: Sequence[Sample]) -> list[np.ndarray]:
    return [np.asarray(s.rollout_log_probs, np.float64) for s in samples]


def _rms(values: np.ndarray) -> float:
    return math.sqrt(float(values @ values) / max(len(values), 1))


def _difference(a: LogProbs, b: LogProbs) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64) - y for x, y in zip(a, b, strict=True)])
