"""What a learner returns: results of training on samples, and of passes that score them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Metrics = dict[str, float]


@dataclass(frozen=True)
class TrainedTokens:
    """Values that training computed for one sample's response tokens, [response_length] float32; None if not computed.

    Attributes:
        log_probs: log-probabilities under the policy before its first optimiser step on this rollout (with
            ``--use-rollout-logprobs``: before the step that trained the sample); 0 where the loss mask is 0.
        advantages: the advantages used in the loss.
    """

    log_probs: np.ndarray | None
    advantages: np.ndarray | None


@dataclass(frozen=True)
class Learned:
    """The result of training on one rollout.

    Attributes:
        metrics: the training metrics.
        steps: number of optimiser steps.
        tokens: values of each sample's tokens, in the order of the samples; empty if the run does not record samples.
    """

    metrics: Metrics
    steps: int
    tokens: Sequence[TrainedTokens] = ()


@dataclass(frozen=True)
class Gradients:
    """The result of ``LearnerHandle.forward_backward``.

    Attributes:
        metrics: metrics of the loss; ``train/loss_sum`` is the sum over all tokens, the others are means.
        log_probs: log-probabilities of each sample's response tokens, [response_length] float32; 0 where the loss mask is 0.
    """

    metrics: Metrics
    log_probs: Sequence[np.ndarray]


@dataclass(frozen=True)
class TopLogProbs:
    """The most probable tokens at each response position of a sample.

    Attributes:
        tokens: [response_length, k] int32, most probable first.
        log_probs: [response_length, k] float32 over the full vocabulary, at the sampling temperature.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
