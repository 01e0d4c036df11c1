"""Load imbalance of experts over a training step.

The load of an expert is the number of tokens that chose it. A layer's imbalance is the largest load divided by the mean load: 1 when
balanced, E / k when all tokens choose the same k of E experts. Loads are counted over the whole optimizer step, because a small
micro-batch is uneven by chance, and a row shared by several samples counts once per sample, so the result does not depend on the
split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_embedded.model.call import active_context
from miles_embedded.model.experts import routed_blocks
from miles_embedded.trainer.packing import Packing

_KEY = "expert_loads"
#: Counters of an expert. Neighbouring choices use different ones, because a GPU adds to one address after the other.
_COUNTERS = 64


class _Served:
    """The number of tokens that each row represents; each of the row's choices of experts counts as often."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self._of_choices: dict[int, tuple[Tensor, Tensor]] = {}

    def of_choices(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the number of tokens of each choice and its counter, [rows * k]. Layers with the same k share the result."""
        if k not in self._of_choices:
            tokens = self.tokens.repeat_interleave(k)
            self._of_choices[k] = tokens, torch.arange(len(tokens), device=tokens.device) % _COUNTERS
        return self._of_choices[k]


class ExpertLoads:
    """Counts the choices of a model's routers while a context is open; without effect for a dense model.

    Several instances may count the same model; the trainer opens their contexts.

    Args:
        model: any causal language model.
    """

    def __init__(self, model: nn.Module) -> None:
        found = routed_blocks(model)
        self._experts = [routed.count for routed in found]
        self._starts = [0, *accumulate(self._experts)]
        self._counts: Tensor | None = None
        for layer, routed in enumerate(found):
            routed.on_choice(partial(self._record, layer))

    def open(self, ctx: Context, packing: Packing) -> None:
        """Start counting for this context."""
        if self._experts:
            rows = len(packing.rows)
            row_of = packing.row_of.remainder(rows + 1)  # -1, no row, is the one after the last
            # counted without a GPU synchronisation
            counts = row_of.new_zeros(rows + 1).scatter_add_(0, row_of, torch.ones_like(row_of))
            ctx.attached[_KEY] = _Served(counts[:rows])

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
        counts, self._counts = self._counts, None
        if not self._experts:
            return []
        # a rank without samples has no counts, but must take part in the sum
        flat = torch.zeros(self._starts[-1], dtype=torch.float64) if counts is None else counts.sum(1).double().cpu()
        return list(sum(flat).split(self._experts))

    def _record(self, layer: int, chosen: Tensor) -> None:
        ctx = active_context()
        if ctx is None or _KEY not in ctx.attached:
            return
        served: _Served = ctx.attached[_KEY]
        if self._counts is None:
            self._counts = served.tokens.new_zeros(self._starts[-1], _COUNTERS)
        count = self._counts[self._starts[layer] : self._starts[layer + 1]].view(-1)
        tokens, counter = served.of_choices(chosen.shape[-1])
        count.scatter_add_(0, chosen.flatten() * _COUNTERS + counter, tokens)
