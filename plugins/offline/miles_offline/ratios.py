"""Log-ratios of texts to the reference, and values of texts on their tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.plugin import MilesError
from miles_core.trainer import AdvantageInputs, expand


def log_ratios(inputs: AdvantageInputs) -> Tensor:
    """Sum log pi/pi_ref over the trained tokens of each text, [samples] float64. MilesError without a reference model."""
    if inputs.kl is None:
        if len(inputs.lengths):
            raise MilesError("preferences are compared with a reference model: give --kl-coef BETA, for example 0.1")
        return torch.zeros(0, dtype=torch.float64)
    return per_sample(torch.where(inputs.mask.bool(), inputs.kl.double(), 0.0), inputs)


def per_sample(values: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Sum [tokens] over each sample: [samples] float64 on the CPU."""
    owner = expand(torch.arange(len(inputs.lengths)), inputs.lengths.cpu())
    return torch.zeros(len(inputs.lengths), dtype=torch.float64).index_add(0, owner, values.cpu())


def on_tokens(scores: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Give every trained token of a text the score of the text, [samples] -> [tokens] float32."""
    spread = expand(scores.to(inputs.mask.device), inputs.lengths)
    return torch.where(inputs.mask.bool(), spread, 0.0).float()
