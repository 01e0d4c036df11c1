"""Metrics of the samples of one rollout."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from miles_core.data.reward_value import number
from miles_core.data.sample import Sample, Status
from miles_core.errors import DataError

if TYPE_CHECKING:
    from miles_core.contracts.run import Run
    from miles_core.rollout.collect import Group


def rollout_metrics(run: Run, groups: list[Group]) -> dict[str, float]:
    """Return statistics of rewards, response lengths and truncation.

    ``reward/all_equal`` is the fraction of groups whose rewards are all equal (no learning signal). ``reward/part/NAME`` is the
    mean of the entry NAME of dict rewards. If the groups contain samples of several policies, the result also has
    ``POLICY/reward/...`` and ``POLICY/rollout/...``.
    """
    samples = [s for group in groups for s in group]
    metrics = _metrics(run, groups, samples)
    for policy, own in by_policy(run, samples).items():
        theirs = [[s for s in group if policy_of(run, s) == policy] for group in groups]
        metrics |= {f"{policy}/{k}": v for k, v in _metrics(run, [g for g in theirs if g], own).items()}
    return metrics


def policy_of(run: Run, sample: Sample) -> str:
    """Return the name of the policy that generated a sample."""
    return sample.policy or run.policy.name


def by_policy(run: Run, samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Group samples by policy name. The result is empty if all samples belong to a single policy."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples if len(run.policies) > 1 else ():
        groups.setdefault(policy_of(run, sample), []).append(sample)
    return groups if len(groups) > 1 else {}


def _metrics(run: Run, groups: list[Group], samples: list[Sample]) -> dict[str, float]:
    key = run.config.reward.reward_key
    rewards = [s.reward_value(key) for s in samples]
    lengths = [s.response_length for s in samples]
    flat = [g for g in groups if len({s.reward_value(key) for s in g}) == 1]
    high, low = max(rewards), min(rewards)
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/all_equal": len(flat) / len(groups),
        "reward/max": high,
        "reward/min": low,
        "rollout/length_mean": statistics.fmean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated": sum(s.status is Status.TRUNCATED for s in samples) / len(samples),
        "rollout/samples": float(len(samples)),
        "rollout/tokens": float(sum(lengths)),
    } | reward_parts(samples, "reward")


def reward_parts(samples: Iterable[Sample], prefix: str) -> dict[str, float]:
    """Return ``PREFIX/part/NAME`` for each numeric entry of dict rewards: its mean over the samples that have the entry."""
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward.items() if isinstance(sample.reward, Mapping) else ():
            with suppress(DataError):
                parts.setdefault(str(name), []).append(number(value, None))
    return {f"{prefix}/part/{name}": statistics.fmean(values) for name, values in parts.items() if values}
