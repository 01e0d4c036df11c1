"""Rejects weights with NaN or Inf during quantisation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from miles_core.errors import MilesError

#: Number of weights that are checked together.
TOGETHER = 64

#: Names, weights [count, ...] and their smaller tensors, which are not finite if a weight is not.
Stack = tuple[Sequence[str], Tensor, Tensor]


class Finite:
    """Checks weights for NaN and Inf in batches.

    Reading a result synchronises with the GPU, which is idle meanwhile; therefore the weights of one GPU are checked together. Call
    ``look`` at the end. If a weight's memory does not stay valid until the check, the error contains only its name.

    Args:
        all_stay: the memory of all weights stays valid.
    """

    def __init__(self, all_stay: bool = False) -> None:
        self._all_stay = all_stay
        self._waiting: list[Mapping[str, Tensor | None] | Sequence[Stack]] = []
        self._ends: list[Tensor] = []
        self._device: torch.device | None = None

    def add(self, name: str, weight: Tensor, stays: bool = False, shows: Tensor | None = None) -> None:
        """Add a weight. ``stays``: its memory stays valid until the check. ``shows``: a smaller tensor that is not finite if the weight is
        not, if there is one.

        Raises:
            MilesError: this weight, or one added before, holds NaN or Inf.
        """
        if weight.numel():
            self._add({name: weight}, weight if shows is None else shows, stays)

    def add_all(self, names: Sequence[str], weights: Sequence[Tensor], stay: bool, shows: Sequence[Tensor]) -> None:
        """Add several weights of one device as ``add`` does; their smaller tensors are checked together."""
        alike = len({each.shape[1:] for each in shows}) == 1
        together = torch.cat(shows if alike else [each.flatten() for each in shows])  # type: ignore[arg-type]
        self._add(dict(zip(names, weights, strict=True)), together, stay)

    def add_shown(self, weights: Mapping[str, Tensor], shows: Tensor) -> None:
        """Add weights of one device whose memory stays valid, with all their smaller tensors in one."""
        self._wait(weights, shows)

    def add_stacks(self, stacks: Sequence[Stack]) -> None:
        """Add stacks of one device, whose memory stays valid; their smaller tensors are checked together."""
        if stacks:
            self._wait(stacks, torch.cat([shows.flatten() for _, _, shows in stacks]))

    def _add(self, weights: Mapping[str, Tensor], shows: Tensor, stay: bool) -> None:
        known = stay or self._all_stay or self._is_due(shows)
        self._wait({name: weight if known else None for name, weight in weights.items()}, shows)

    def _is_due(self, shows: Tensor) -> bool:
        """Whether all weights are checked as soon as these are added."""
        return not shows.is_cuda or len(self._waiting) + 1 == TOGETHER

    def _wait(self, weights: Mapping[str, Tensor | None] | Sequence[Stack], shows: Tensor) -> None:
        if self._waiting and self._device != shows.device:
            self.look()
        due, self._device = self._is_due(shows), shows.device
        self._waiting.append(weights)
        self._ends += torch.aminmax(shows)  # one pass without a mask in memory; NaN comes through
        if due:
            self.look()

    def look(self) -> None:
        """Check all pending weights; raise MilesError if one is not finite."""
        waiting, ends = self._waiting, self._ends
        self._waiting, self._ends = [], []
        if not waiting:
            return
        finite = torch.stack(ends).isfinite().tolist()
        for weights, low, high in zip(waiting, finite[::2], finite[1::2], strict=True):
            if not low or not high:
                _refuse(weights if isinstance(weights, Mapping) else _unbind(weights))


def _unbind(stacks: Sequence[Stack]) -> dict[str, Tensor | None]:
    return {name: each for names, weights, _ in stacks for name, each in zip(names, weights.unbind(0), strict=True)}


def _refuse(weights: Mapping[str, Tensor | None]) -> None:
    """Raise the error for weights of which at least one is not finite."""
    found = next(((n, w) for n, w in weights.items() if w is not None and not w.isfinite().all()), None)
    if found is not None:
        which, what = found[0], _bad(found[1])
    else:  # their memory is no longer valid
        names = [*weights]
        first, last = names[0], names[-1]
        which = first if first == last else f"one of {len(weights)} weights from {first} to {last}"
        what = "values that are NaN or Inf"
    raise MilesError(
        f"{which} holds {what}; it cannot be quantised. Training diverged or the checkpoint is damaged: look at the last "
        "gradient norms, or resume from an earlier step with a lower --lr"
    )


def _bad(weight: Tensor) -> str:
    bad = ~weight.isfinite()
    first = bad.nonzero()[0].tolist()
    return f"{int(bad.sum())} values that are NaN or Inf, the first ({weight[tuple(first)].item()}) at {first}"
