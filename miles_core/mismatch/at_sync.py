"""``--verify-logprobs``: after every weight sync, engine and trainer score the same tokens.

The engine generates responses to a few probe prompts with its new weights. Its log-probabilities of the sampled tokens are compared
with the trainer's, computed as in training; a mean |delta| above the tolerance stops the run. Two checks detect an engine that serves
older weights: the version of the tokens, and the movement of its scores (``movement``), for which the tokens of the previous sync are scored
again on both sides, if the engine supports ``score``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.data.sample import Sample
from miles_core.errors import MismatchError
from miles_core.mismatch.budget import BUDGET_FILE, budget, in_this_process
from miles_core.mismatch.gap import Gap, measure
from miles_core.mismatch.movement import Scores, can_score
from miles_core.mismatch.probe import bare, probe, probe_prompts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from miles_core.contracts.run import Policy, Run
    from miles_core.contracts.runtime import PolicyParts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Earlier:
    """The probe of the previous sync: its samples with recorded fields, their scores without these fields (None if the engine cannot score), and
    the number formats of both sides. ``first``: True if it was the first sync."""

    recorded: list[Sample]
    scores: Scores | None
    formats: object
    first: bool


def make_check(run: Run) -> Callable[[PolicyParts], Awaitable[Mapping[str, float]]] | None:
    """Create the check named ``verify_logprobs``; None without ``--verify-logprobs``."""
    return VerifySync(run) if run.config.run.verify_logprobs else None


class VerifySync:
    """Compares the engine of a policy with its trainer. ``weights_arrived``, which runs before it, has checked the reported version."""

    def __init__(self, run: Run) -> None:
        self._run, self._prompts = run, probe_prompts(run)
        self._earlier: dict[str, _Earlier] = {}
        self._budgets: dict[str, dict[str, Any]] = {}

    async def __call__(self, parts: PolicyParts) -> dict[str, float]:
        """Check the last sync of a policy and return metrics.

        Raises:
            MismatchError: the engine serves other weights, or the gap between both sides exceeds the tolerance.
        """
        run, policy = self._run, parts.policy
        last = self._earlier.get(policy.name)
        moved = None
        if last is not None and last.scores is not None:
            moved = last.scores.check_movement(policy, await Scores.measure(run, parts, last.scores.samples))
        samples = await probe(run, parts, self._prompts, key=policy.version * len(self._prompts))
        check_versions_of(samples, policy)
        engine = [np.asarray(s.rollout_log_probs, np.float64) for s in samples]
        gap = measure(engine, await parts.learner.log_probs(samples), samples, run.decode)
        if gap.mean_abs > run.config.run.verify_logprobs_tolerance:
            raise MismatchError(await self._describe(parts, gap), gap)
        older = run.config.trains_on_older
        if last is None:
            await self._write_budget(parts, await probe(run, parts, self._prompts, support=True))
        elif older and last.first and parts.precisions == last.formats:
            await self._write_budget(parts, last.recorded)  # the age of these samples is typical of most steps
        scores = await Scores.measure(run, parts, [bare(s) for s in samples]) if can_score(run, parts) else None
        self._earlier[policy.name] = _Earlier(samples, scores, parts.precisions, first=last is None)
        if older or not in_this_process(parts.serving):  # otherwise the engine's weights can be read
            await parts.learner.take_snapshot(policy.version)
        return gap.metrics("verify") | ({} if moved is None else {"verify/moved": moved})

    async def _write_budget(self, parts: PolicyParts, samples: Sequence[Sample]) -> None:
        """Measure the budget of ``samples`` and save it in the run directory for the report."""
        found = await budget(self._run, parts, samples)
        self._budgets[parts.policy.name] = {"version": parts.policy.version, **found.to_dict()}
        (self._run.directory / BUDGET_FILE).write_text(json.dumps(self._budgets, indent=1) + "\n", encoding="utf-8")

    async def _describe(self, parts: PolicyParts, gap: Gap) -> str:
        """Describe a gap beyond the tolerance, with its largest causes and the worst tokens."""
        found = await budget(self._run, parts, await probe(self._run, parts, self._prompts, support=True))
        causes = ", ".join(f"{c.name} {c.share:.0%}" for c in found.ordered()[:3])
        worst = "\n  ".join(map(str, gap.worst[:4]))
        return (
            f"engine and trainer disagree by {gap.mean_abs:.3g} nats per token (mean |delta log p| over {gap.tokens} tokens, "
            f"largest {gap.max_abs:.3g}) at weight version {parts.policy.version}, beyond --verify-logprobs-tolerance "
            f"{self._run.config.run.verify_logprobs_tolerance:g}; by cause: {causes} (miles verify --budget shows more). The worst tokens:\n"
            f"  {worst}"
        )


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
