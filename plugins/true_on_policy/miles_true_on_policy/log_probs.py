"""Log-probabilities of sampled tokens, computed as the embedded engine computes them (``miles_embedded.engine.sampling.distribution``)."""

from __future__ import annotations

import torch
from torch import Tensor

from miles_core.data import Ragged
from miles_true_on_policy import products


def log_softmax(logits: Tensor) -> Tensor:
    """Normalise logits [..., vocabulary] FP32: PyTorch's function on a CPU, one program per row on a GPU."""
    if not products.uses_kernels(logits) or logits.dtype != torch.float32:
        return logits.log_softmax(-1)
    from miles_true_on_policy.normalize import log_softmax as normalize

    return normalize(logits)


def log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return [rows]: log-probabilities of ``tokens`` [rows] over logits [rows, vocabulary]."""
    return log_softmax(logits).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


class KernelLogProbs:
    """``log_probs`` on a GPU, with the same bits, also from logits in the model's type; see ``Operations.log_probs``."""

    def __call__(self, logits: Tensor, tokens: Tensor) -> Tensor:
        if logits.dtype == torch.float64:
            return log_probs(logits, tokens)
        return self.of_logits(logits, tokens, 1.0)

    def of_logits(self, logits: Tensor, tokens: Tensor, temperature: float | Tensor) -> Tensor:
        """Return [rows] FP32 from logits that are neither converted nor divided by the temperature, a number or [rows, 1] FP32."""
        from miles_true_on_policy.normalize import pick_log_softmax

        return pick_log_softmax(logits, tokens, temperature)


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
    narrow = log_softmax(torch.where(kept, log_softmax(logits), -torch.inf))
    return narrow.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
