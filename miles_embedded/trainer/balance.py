"""The sequence-wise load-balancing loss for mixtures of experts (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20).

For a sequence of T tokens and a layer with E experts, k chosen per token: ``f_e = E / (k T) * (number of tokens that chose e)``, ``P_e =``
mean normalised score of e, and ``loss = coefficient * sum_e f_e P_e``, which equals the coefficient when balanced. Layers are summed. A
loss per sequence instead of per batch is a sum over sequences, so it does not depend on the micro-batches.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_core.data.batch import Batch
from miles_core.errors import ConfigError
from miles_embedded.model.call import active_context
from miles_embedded.model.experts import routed_blocks
from miles_embedded.trainer.packing import Packing

_KEY = "load_balance"


class Balance:
    """Records router outputs of a model while a context is open, and computes the loss when it is closed.

    Args:
        model: a mixture-of-experts model; ConfigError if it has no routers.
        coefficient: coefficient of the loss.
    """

    def __init__(self, model: nn.Module, coefficient: float) -> None:
        self.coefficient = coefficient
        found = routed_blocks(model)
        if not found:
            raise ConfigError(
                f"--aux-loss-coef {coefficient}: {type(model).__name__} has no routed experts to balance; leave the flag out"
            )
        self._sigmoid = [x.top_k > 0 or hasattr(x.router, "e_score_correction_bias") for x in found]
        self._experts = [x.count for x in found]
        for layer, routed in enumerate(found):
            routed.on_logits(partial(_record, ("logits", layer)))
            routed.on_choice(partial(_record, ("chosen", layer)))

    def open(self, ctx: Context) -> None:
        """Start recording for this context."""
        ctx.attached[_KEY] = {}

    def close(self, ctx: Context, micro_batch: Batch, packing: Packing) -> dict[str, tuple[Tensor, Tensor]]:
        """Stop recording, also for recomputation, and return the loss in the form of ``Output.aux``."""
        seen: dict[tuple[str, int], Tensor] = ctx.attached.pop(_KEY)
        known = (packing.row_of >= 0).nonzero().flatten()
        owner, rows = micro_batch.owner[known], packing.row_of[known]
        sizes = torch.bincount(owner, minlength=len(micro_batch)).clamp(min=1)
        trained = torch.zeros(len(micro_batch), device=owner.device)
        trained.index_add_(0, micro_batch.owner, (micro_batch.mask != 0).float())
        total = torch.zeros((), device=owner.device)
        for layer, count in enumerate(self._experts):
            logits, chosen = seen["logits", layer].float(), seen["chosen", layer]
            scores = logits.sigmoid() if self._sigmoid[layer] else logits.softmax(-1)
            if self._sigmoid[layer]:
                scores = scores / scores.sum(-1, keepdim=True)
            times = torch.zeros_like(scores).scatter_add_(1, chosen, torch.ones_like(chosen, dtype=scores.dtype))
            mean_score = _average_by_sample(scores, rows, owner, sizes)
            frequency = _average_by_sample(times, rows, owner, sizes) * (count / chosen.shape[1])
            total = total + (trained * (frequency * mean_score).sum(1)).sum()
        return {"load_balance": (self.coefficient * total, trained.sum())}


def _average_by_sample(values: Tensor, rows: Tensor, owner: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean over each sample's rows; a shared row counts for every sample that contains it."""
    out = values.new_zeros(len(sizes), values.shape[1]).index_add(0, owner, values.index_select(0, rows))
    return out / sizes.unsqueeze(1)


def _record(key: tuple[str, int], value: Tensor) -> None:
    ctx = active_context()
    if ctx is not None and _KEY in ctx.attached:
        ctx.attached[_KEY][key] = value
