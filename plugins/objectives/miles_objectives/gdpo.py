"""GDPO: several rewards per sample, each normalised separately (arXiv 2601.05242).

    A = sum_k w_k (R_k - mean_group R_k) / (std_group R_k + 1e-6),   then over all samples of the rollout: (A - mean) / (std + 1e-6)

GRPO on the sum of the rewards gives equal advantages to groups whose rewards differ in different entries. The loss is that of GRPO. If all A of a
rollout are equal, its advantages are 0. The constant 1e-6 is our choice, the same as in GRPO; the authors' code has 1e-4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from miles_core.trainer import ADVANTAGES, AdvantageInputs, expand

#: Field of a sample with its rewards, in the order of ``--gdpo-rewards``.
PARTS = "reward_parts"
_EPS = 1e-6


def gdpo(inputs: AdvantageInputs, parts: Tensor, weights: Mapping[str, float]) -> Tensor:
    """Compute advantages [tokens] from the rewards ``parts`` [samples, len(weights)]."""
    ones = torch.ones_like(inputs.lengths)
    total = torch.zeros(len(ones), dtype=torch.float64)
    for k, weight in enumerate(weights.values()):
        own = replace(inputs, rewards=parts[:, k].double(), lengths=ones, mask=ones.float(), kl=None, batch=None)
        total = total + weight * ADVANTAGES["grpo"](own).cpu()
    count = inputs.sum(torch.tensor(float(len(total)), dtype=torch.float64)).clamp(min=1.0)
    mean = inputs.sum(total.sum()) / count
    deviation = (inputs.sum((total - mean).square().sum()) / (count - 1).clamp(min=1.0)).sqrt()
    scores = ((total - mean) / (deviation + _EPS)).to(inputs.mask.device)
    return torch.where(inputs.mask.bool(), expand(scores, inputs.lengths), 0.0)
