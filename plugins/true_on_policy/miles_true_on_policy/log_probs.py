"""Log-probabilities of sampled tokens, computed as the embedded engine computes them (``miles_embedded.engine.sampling.distribution``)."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.data import Ragged


def supported_log_probs(logits: Tensor, tokens: Tensor, support: Ragged) -> Tensor:
    """Return [rows]: log-probabilities of ``tokens`` [rows] among the ids of each row's support.

    The engine normalises twice, over the vocabulary and over the support. So does this function: another order of the same sums would differ
    in the last bit.

    Args:
        logits: [rows, vocabulary], divided by the temperature.
        tokens: [rows] ids.
        support: [rows] ids that each token was sampled from.
    """
    kept = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
    owner = torch.repeat_interleave(torch.arange(len(logits), device=logits.device), support.offsets.diff())
    kept[owner, support.values.long()] = True
    narrow = torch.where(kept, logits.log_softmax(-1), -torch.inf).log_softmax(-1)
    return narrow.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
