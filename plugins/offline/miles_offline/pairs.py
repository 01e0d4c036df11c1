"""Pairs of a chosen and a rejected text: their log-ratios to the reference, and values of a pair on its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_core.plugin import MilesError
from miles_core.trainer import AdvantageInputs
from miles_offline.ratios import log_ratios, on_tokens, per_sample

#: Batch scalars of each sample, for metrics: loss of its pair, and the implicit rewards of both texts.
LOSS, CHOSEN, REJECTED = "pair_loss", "pair_chosen", "pair_rejected"


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch.

    Attributes:
        inputs: the batch; the reward of a chosen text is 1, that of a rejected one 0. A pair has the same ``group``.
        chosen, rejected: [pairs] int64 positions of the texts among the samples, in order of the groups.
        counts: [samples] float64, number of trained tokens of each text.
    """

    inputs: AdvantageInputs
    chosen: Tensor
    rejected: Tensor
    counts: Tensor

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> Pairs:
        """Find the pairs. MilesError if a text lacks its other side."""
        group, preferred = inputs.group.cpu(), inputs.rewards.cpu() > 0
        order = torch.argsort(group, stable=True)
        chosen, rejected = order[preferred[order]], order[~preferred[order]]
        if not torch.equal(group[chosen], group[rejected]):
            raise MilesError(
                f"{len(chosen)} chosen and {len(rejected)} rejected texts do not form pairs; each needs its other side in the same group"
            )
        return cls(inputs, chosen, rejected, per_sample(inputs.mask.bool().double(), inputs))

    def sums(self, by_length: bool = False) -> tuple[Tensor, Tensor]:
        """Return the log-ratios to the reference of chosen and rejected texts, [pairs] float64: sums over trained tokens, or their means."""
        total = log_ratios(self.inputs)
        if by_length:
            total = total / self.counts.clamp(min=1)
        return total[self.chosen], total[self.rejected]

    def on_tokens(self, value: Tensor, by_length: bool) -> Tensor:
        """Give the tokens of chosen texts ``value`` [pairs], and those of rejected ones its negative: [tokens] float32. ``by_length``
        divides it by the text's number of trained tokens."""
        scores = torch.zeros(len(self.inputs.lengths), dtype=torch.float64)
        scores[self.chosen], scores[self.rejected] = value, -value
        if by_length:
            scores = scores / self.counts.clamp(min=1)
        return on_tokens(scores, self.inputs)

    def record(self, loss: Tensor, chosen: Tensor, rejected: Tensor) -> None:
        """Store values of pairs [pairs] in the scalars of both of their samples, for the metrics of the step."""
        if self.inputs.batch is None:
            return
        for name, value in ((LOSS, loss), (CHOSEN, chosen), (REJECTED, rejected)):
            column = torch.zeros(len(self.inputs.lengths), dtype=torch.float64)
            column[self.chosen] = column[self.rejected] = value
            self.inputs.batch.scalars[name] = column.to(self.inputs.mask.device)
