"""Which weights a sample's tokens come from, and how old they are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from miles_core.data.sample import Sample
from miles_core.rollout.summary import by_policy

if TYPE_CHECKING:
    from miles_core.contracts.run import Run


def trained_versions(sample: Sample) -> np.ndarray:
    """The weight version of each token that is trained on, [tokens with loss mask 1] int64; empty where the engine did not
    say."""
    if not sample.weight_versions:
        return np.zeros(0, np.int64)
    starts = np.array([index for index, _ in sample.weight_versions])
    versions = np.array([version for _, version in sample.weight_versions], np.int64)
    tokens = sample.prompt_length + np.flatnonzero(sample.mask)
    return versions[np.searchsorted(starts, tokens, side="right") - 1]


def age(sample: Sample, version: int) -> int:
    """How many versions older than ``version`` the oldest token is that is trained on."""
    versions = trained_versions(sample)
    return version - int(versions.min()) if len(versions) else 0


def mask_older(sample: Sample) -> None:
    """Leave the tokens out of the loss that come from older weights than the sample's newest token."""
    if len({version for _, version in sample.weight_versions}) < 2:
        return
    newest = max(version for _, version in sample.weight_versions)
    first = min(index for index, version in sample.weight_versions if version == newest) - sample.prompt_length
    mask, log_probs = list(sample.mask), sample.rollout_log_probs
    sample.loss_mask = [0] * first + mask[first:]
    if log_probs is not None:
        sample.rollout_log_probs = [0.0] * first + list(log_probs[first:])


def current_version(run: Run, sample: Sample) -> int:
    """The version that the sample's policy serves now."""
    named = sample.policy or run.policy.name
    return next((policy.version for policy in run.policies if policy.name == named), run.policy.version)


def staleness(run: Run, samples: Sequence[Sample]) -> dict[str, float]:
    """Of the samples that the policies train on now: mean and largest age in versions, and the fraction of tokens that older weights
    generated; with several policies also for each of them."""
    newest = [current_version(run, sample) for sample in samples]
    ages = [age(sample, version) for sample, version in zip(samples, newest, strict=True)]
    stale = [trained_versions(sample) < version for sample, version in zip(samples, newest, strict=True)]
    tokens = np.concatenate([np.zeros(0, bool), *stale])
    found = {
        "rollout/staleness_mean": statistics.fmean(ages),
        "rollout/staleness_max": float(max(ages)),
        "rollout/stale_tokens": float(tokens.mean()) if len(tokens) else 0.0,
    }
    for policy, own in by_policy(run, samples).items():
        found |= {f"{policy}/{name}": value for name, value in staleness(run, own).items()}
    return found
