"""Load imbalance of experts over a training step.

The load of an expert is the number of tokens that chose it. A layer's imbalance is the largest load divided by the mean load: 1 when
balanced, E / k when all tokens choose the same k of E experts. Loads are counted over the whole optimizer step, because a small
micro-batch is uneven by chance, and a row shared by several samples counts once per sample, so the result does not depend on the
split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_embedded.model.call import active_context
from miles_embedded.model.experts import routed_blocks
from miles_embedded.trainer.packing import Packing

_KEY = "expert_loads"


class ExpertLoads:
    """Counts the choices of a model's routers while a context is open; without effect for a dense model.

    Several may count one model; the trainer opens the contexts for all of them.

    Args:
        model: any causal language model.
    """

    def __init__(self, model: nn.Module) -> None:
        found = routed_blocks(model)
        self._experts = [routed.count for routed in found]
        self._counts: list[Tensor | None] = [None] * len(found)
        for layer, routed in enumerate(found):
            routed.on_choice(partial(self._record, layer))

    def open(self, ctx: Context, packing: Packing) -> None:
        """Start counting for this context."""
        if self._experts:
            rows = len(packing.rows)
            row_of = torch.where(packing.row_of < 0, rows, packing.row_of)
            # number of tokens that each row serves; computed without a GPU synchronisation
            ctx.attached[_KEY] = row_of.new_zeros(rows + 1).scatter_add_(0, row_of, torch.ones_like(row_of))[:rows]

    def close(self, ctx: Context) -> None:
        """Stop counting, so that recomputation is not counted."""
        ctx.attached.pop(_KEY, None)

    def take(self, sum: Callable[[Tensor], Tensor]) -> dict[str, tuple[float, float]]:
        """Return the metric for everything counted since the last call: the worst layer's imbalance. Empty if nothing was counted.

        Args:
            sum: sums over data-parallel ranks.
        """
        values = [float(load.max() / load.mean()) for load in self.take_counts(sum) if load.any()]
        return {"train/expert_imbalance": (max(values), 1.0)} if values else {}

    def take_counts(self, sum: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return the load of every expert since the last call: [experts] float64 on the CPU for each layer with experts. A collective.

        Args:
            sum: sums over data-parallel ranks.
        """
        counts, self._counts = self._counts, [None] * len(self._experts)
        if not counts:
            return []
        # a rank without samples counted nothing, but has to take part in the sum
        home = next((count.device for count in counts if count is not None), torch.device("cpu"))
        flat = [
            torch.zeros(n, device=home) if count is None else count
            for n, count in zip(self._experts, counts, strict=True)
        ]
        return list(sum(torch.cat([count.double() for count in flat]).cpu()).split(self._experts))

    def _record(self, layer: int, chosen: Tensor) -> None:
        ctx = active_context()
        if ctx is None or _KEY not in ctx.attached:
            return
        served = ctx.attached[_KEY]
        count = self._counts[layer]
        if count is None:
            count = self._counts[layer] = served.new_zeros(self._experts[layer])
        count.scatter_add_(0, chosen.flatten(), served.repeat_interleave(chosen.shape[-1]))
