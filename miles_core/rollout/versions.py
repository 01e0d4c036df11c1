"""Weight versions of the tokens of a sample, and their age."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from miles_core.data.column import FLOATS, MASK, Column
from miles_core.data.sample import Sample
from miles_core.rollout.collect import by_policy

if TYPE_CHECKING:
    from miles_core.contracts.run import Run


def trained_versions(sample: Sample) -> np.ndarray:
    """Return the weight version of each trained token, int64 [number of tokens with loss mask 1]; empty if the engine reported
    no versions."""
    if not sample.weight_versions:
        return np.zeros(0, np.int64)
    return sample.versions[np.flatnonzero(sample.mask)]


def age(sample: Sample, version: int) -> int:
    """Return how many versions the oldest trained token is behind ``version``; 0 if versions are unknown."""
    versions = trained_versions(sample)
    return version - int(versions.min()) if len(versions) else 0


def mask_older(sample: Sample) -> None:
    """Set the loss mask to 0 for all tokens before the first token of the sample's newest weight version."""
    if len({version for _, version in sample.weight_versions}) < 2:
        return
    newest = max(version for _, version in sample.weight_versions)
    first = min(index for index, version in sample.weight_versions if version == newest) - sample.prompt_length
    sample.loss_mask = Column(MASK, bytes(first)) + sample.mask[first:]
    if sample.rollout_log_probs is not None:
        sample.rollout_log_probs = Column(FLOATS, bytes(8 * first)) + sample.rollout_log_probs[first:]


def current_version(run: Run, sample: Sample) -> int:
    """Return the current version of the sample's policy."""
    named = sample.policy or run.policy.name
    return next((policy.version for policy in run.policies if policy.name == named), run.policy.version)


def staleness(run: Run, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean and maximum age of ``samples`` in versions, and the fraction of trained tokens that older weights generated.

    With several policies the result also has ``POLICY/rollout/...`` for each policy.
    """
    newest = [current_version(run, sample) for sample in samples]
    ages = [age(sample, version) for sample, version in zip(samples, newest, strict=True)]
    stale = [trained_versions(sample) < version for sample, version in zip(samples, newest, strict=True)]
    tokens = np.concatenate([np.zeros(0, bool), *stale])
    metrics = {
        "rollout/staleness_mean": statistics.fmean(ages),
        "rollout/staleness_max": float(max(ages)),
        "rollout/stale_tokens": float(tokens.mean()) if len(tokens) else 0.0,
    }
    for policy, own in by_policy(run, samples).items():
        metrics |= {f"{policy}/{name}": value for name, value in staleness(run, own).items()}
    return metrics
