"""DAPO: decoupled clip and dynamic sampling policy optimization (arXiv 2503.14476), as options of GRPO.

    --advantage-estimator grpo          A_i = (R_i - mean R) / (std R + 1e-6), see ``grpo``
    --eps-clip 0.2 --eps-clip-high 0.28 a ratio may rise further than it may fall (section 3.1): L_t of ``grpo`` with two bounds
    --dynamic-sampling-filter-path nonzero_std   replace groups whose rewards are all equal: their advantages are 0 (section 3.2)
    --loss-aggregation token_mean       w_t = 1 / (trained tokens of the step), so a long answer counts more than a short one (section 3.3)
    --overlong-buffer-len B             R_i + p(length of i): a soft penalty for long answers (section 3.4, equation 13)

This page has the functions that GRPO does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles_core.algorithm.objective import local_sum
from miles_core.errors import ConfigError


def token_mean(mask: Tensor, sum: Callable[[Tensor], Tensor] = local_sum) -> Tensor:
    """Compute the weight of each token, ``--loss-aggregation token_mean``; arguments as for ``choices.loss_weights``."""
    ones = mask.bool().double()
    return (ones / sum(ones.sum()).clamp(min=1.0)).float()


def overlong_penalty(response_lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Return the penalty to add to each reward, float64 [samples], in [-factor, 0].

    The penalty is 0 up to ``max_length - buffer`` tokens, decreases linearly to -factor at ``max_length``, and is -factor beyond.

    Args:
        response_lengths: [samples], in tokens.
        max_length: length in tokens at which the full penalty is reached.
        buffer: length in tokens of the linear part; DAPO used 4,096 of 20,480.
        factor: magnitude of the full penalty.
    """
    if not 0 < buffer <= max_length:
        raise ConfigError(
            f"the over-length buffer must be between 1 and the longest response {max_length}, got {buffer}"
        )
    beyond = response_lengths.double() - (max_length - buffer)
    return -factor * torch.clamp(beyond / buffer, 0.0, 1.0)
