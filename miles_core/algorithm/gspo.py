"""GSPO: group sequence policy optimization (arXiv 2507.18071).

The n rollouts of a prompt have the rewards R_1, ..., R_n. For every trained token of sample i, which has T_i of them:

    advantage       A_i = (R_i - mean R) / (std R + 1e-6)                        as in GRPO
    ratio           s_i = exp( (1 / T_i) sum_t log(pi(t) / pi_old(t)) )          one per sequence, gradient through the mean
    loss            L_i = max(-A_i s_i, -A_i clip(s_i, 1 - eps, 1 + eps_high))
    normalization   w_t = 1 / (trained tokens of the rollout * rollouts of the step), as in GRPO

The paper's clip is narrow: ``--eps-clip 3e-4 --eps-clip-high 4e-4`` (section 5.1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.algorithm import grpo
from miles_core.algorithm.objective import Clip, Metrics, Objective, PolicyLossInputs
from miles_core.algorithm.ratio import log_ratio_of, ratio_of
from miles_core.data.batch import segment_sum


def policy_loss(inputs: PolicyLossInputs, clip: Clip) -> tuple[Tensor, Metrics]:
    """Compute the clipped loss with one ratio per sequence: ([tokens] loss, metrics as (sum, count)). Needs ``inputs.segments``."""
    log_ratio = log_ratio_of(inputs)
    return grpo.clipped_loss(ratio_of(sequence_mean(log_ratio, inputs)), log_ratio, inputs, clip)


def sequence_mean(values: Tensor, inputs: PolicyLossInputs) -> Tensor:
    """Replace each value [tokens], which is 0 for masked tokens, by the mean over the trained tokens of its sample."""
    segments = inputs.segments
    if segments is None:
        raise ValueError("gspo needs PolicyLossInputs.segments: which sample each token belongs to")
    if len(segments) == 0:
        return values
    if bool((segments.diff() < 0).any()):
        raise ValueError("PolicyLossInputs.segments must be non-decreasing")
    lengths = torch.bincount(segments)
    counts = segment_sum(inputs.mask.bool().double(), lengths).clamp(min=1.0)
    return (segment_sum(values, lengths) / counts)[segments].to(values.dtype)


GSPO = Objective(grpo.advantage, policy_loss)
