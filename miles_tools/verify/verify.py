"""Implements ``miles verify``: builds engine and trainer as a run would, and compares their log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.data.sample import Sample
from miles_core.mismatch.at_sync import check_version, check_versions_of
from miles_core.mismatch.budget import Budget, budget, in_this_process
from miles_core.mismatch.gap import Gap, measure
from miles_core.mismatch.movement import can_score, score_each
from miles_core.mismatch.probe import ProbePrompt, bare, probe, probe_prompts
from miles_core.precision.quantizer import SideParity
from miles_tools.verify.layers import LayerComparison, compare_rows, find_models, record_rows

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import PolicyParts


@dataclass(frozen=True)
class Verification:
    """One policy's result.

    Attributes:
        gap: difference between the engine's log-probs during sampling and the trainer's during training.
        decoding: difference between the engine's log-probs during decoding and its scores of the whole sequence; None if it cannot
            score or the sampler is truncated.
        budget: causes of the gap, if requested.
        layers: outputs of every module on both sides, if requested.
        parity: probe results of each side with a number format, compared with its declared parity.
        findings: with a running server: sentences about the causes beyond rounding, the largest first; None for engines of a run.
        engine, trainer: the log-probabilities, one array per sample, for plots.
    """

    policy: str
    tolerance: float
    gap: Gap
    decoding: Gap | None
    budget: Budget | None
    samples: Sequence[Sample]
    engine: Sequence[np.ndarray]
    trainer: Sequence[np.ndarray]
    parity: Sequence[SideParity] = ()
    layers: LayerComparison | None = None
    findings: Sequence[str] | None = None

    @property
    def ok(self) -> bool:
        """Within the tolerance; if the layers were compared, bit-identical; of a running server, without a cause beyond rounding."""
        if self.findings is not None:
            return not self.findings
        if self.layers is not None:
            return bool(self.layers.modules) and self.layers.first is None and self.gap.max_abs == 0
        return self.gap.mean_abs <= self.tolerance

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-compatible data without the samples."""
        return {
            "policy": self.policy,
            "ok": self.ok,
            "tolerance": self.tolerance,
            "gap": self.gap.to_dict(),
            "decoding": self.decoding and self.decoding.to_dict(),
            "budget": self.budget and self.budget.to_dict(),
            "parity": [side.to_dict() for side in self.parity],
            "layers": self.layers and self.layers.to_dict(),
            "findings": self.findings,
        }


async def verify(
    run: Run,
    parts: Sequence[PolicyParts],
    resume_from: Path | None = None,
    with_budget: bool = False,
    exact: bool = False,
) -> list[Verification]:
    """Verify every policy of a run whose parts were just built.

    Args:
        run, parts: result of ``run.parts.built``.
        resume_from: checkpoint to load first.
        with_budget: attribute the gap to its causes.
        exact: compare the outputs of every module.
    """
    prompts = probe_prompts(run)
    found = []
    for each in parts:
        policy = each.policy
        if each.engine is None:  # no engine to compare the trainer with
            continue
        if resume_from is not None:
            if with_budget and not in_this_process(each.serving):
                await each.learner.take_snapshot(-1)  # the weights that the engine started with
            await each.learner.load(resume_from / policy.name)
        policy.version = (await each.learner.push(run.step)).version
        found.append(await verify_policy(run, each, prompts, with_budget, exact))
    return found


async def verify_policy(
    run: Run, parts: PolicyParts, prompts: Sequence[ProbePrompt], with_budget: bool = False, exact: bool = False
) -> Verification:
    """Compare the engine of a policy with its trainer; both must be built and synced.

    Raises:
        ConfigError: ``exact``, and a side is in another process.
    """
    policy = parts.policy
    check_version(parts)
    models = find_models(parts) if exact else (None, None)
    with record_rows(models[0]) as of_engine:
        samples = await probe(run, parts, prompts)
    check_versions_of(samples, policy)
    engine = [np.asarray(s.rollout_log_probs, np.float64) for s in samples]
    with record_rows(models[1]) as of_trainer:
        trainer = await parts.learner.log_probs(samples)
    alone = [bare(s) for s in samples]
    cannot = not can_score(run, parts) or any(s.fields.get("sampling_support") or s.media for s in samples)
    scored = None if cannot else next(iter((await score_each(run, parts, alone)).values()))
    return Verification(
        policy=policy.name,
        tolerance=run.config.run.verify_logprobs_tolerance,
        gap=measure(engine, trainer, samples, run.decode),
        decoding=None if scored is None else measure(engine, scored, samples),
        budget=await budget(run, parts, await probe(run, parts, prompts, support=True)) if with_budget else None,
        samples=samples,
        engine=engine,
        trainer=trainer,
        parity=parts.parity,
        layers=compare_rows(of_engine, of_trainer) if exact else None,
    )
