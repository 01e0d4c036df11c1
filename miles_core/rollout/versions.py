"""Which weights a sample's tokens come from, and how old they are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from miles_core.data.sample import Sample


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


def staleness(samples: Sequence[Sample], version: int) -> dict[str, float]:
    """Of the samples that are trained on while ``version`` is the newest: mean and largest age in versions, and the
    fraction of tokens that older weights generated."""
    ages = [age(sample, version) for sample in samples]
    versions = np.concatenate([np.zeros(0, np.int64), *map(trained_versions, samples)])
    return {
        "rollout/staleness_mean": statistics.fmean(ages),
        "rollout/staleness_max": float(max(ages)),
        "rollout/stale_tokens": float((versions < version).mean()) if len(versions) else 0.0,
    }
