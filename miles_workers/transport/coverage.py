"""Detects parameters of an engine's model that an update did not write.

An engine may load the tensors it receives and not report parameters without one. For example, a model may have a separate output layer
although the checkpoint ties it to the embedding; that parameter would keep its random initial values. Before the first update a few
elements of every parameter are therefore overwritten with marks. A parameter that still has all its marks afterwards was not written.
This works however the model copies: in place, in threads, or into new memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

#: Marked elements of a parameter, evenly spaced.
_MARKS = 16
#: Element size -> integer dtype of that size, because indexing does not support every dtype.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Coverage:
    """Writes marks to all parameters of a model when created, and finds the parameters that the first update did not write.

    Args:
        model: the engine's model; parameters that share memory count once, under the first name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._marked: dict[str, tuple[int, tuple[Tensor, ...], Tensor, Tensor]] = {}
        draw = torch.Generator().manual_seed(20)
        seen: set[tuple[int, tuple[int, ...]]] = set()
        with torch.device("cpu"):  # an engine may have made its GPU the default, which the generator does not take
            for name, parameter in model.named_parameters():
                memory = (parameter.data_ptr(), tuple(parameter.shape))
                if parameter.numel() and parameter.device.type != "meta" and memory not in seen:
                    seen.add(memory)
                    self._mark(name, parameter, draw)

    def _mark(self, name: str, parameter: Tensor, draw: torch.Generator) -> None:
        numbers = _as_integers(parameter)
        count = min(_MARKS, numbers.numel())
        flat = torch.linspace(0, numbers.numel() - 1, count, dtype=torch.float64).long().unique()
        place = tuple(index.to(numbers.device) for index in torch.unravel_index(flat, numbers.shape))
        before = numbers[place].clone()
        most = min(torch.iinfo(numbers.dtype).max, 1 << 31)
        marks = torch.randint(1, most, before.shape, generator=draw).to(numbers.dtype).to(numbers.device)
        numbers[place] = marks
        self._marked[name] = (parameter.data_ptr(), place, before, marks)

    @torch.no_grad()
    def finish(self, model: nn.Module, ignored: Sequence[str] = ()) -> list[str]:
        """Restore the marked elements that no update wrote.

        Args:
            model: the same model.
            ignored: name suffixes of parameters that updates do not write.

        Returns:
            names of the other parameters that were not written at all.
        """
        unwritten, suffixes = list[str](), tuple(ignored)
        parameters = dict(model.named_parameters())
        for name, (memory, place, before, marks) in self._marked.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.data_ptr() != memory:  # replaced by new memory, so it was written
                continue
            numbers = _as_integers(parameter)
            left = numbers[place] == marks
            numbers[place] = torch.where(left, before, numbers[place])
            if bool(left.all()) and not name.endswith(suffixes):
                unwritten.append(name)
        self._marked.clear()
        return unwritten


def _as_integers(parameter: Tensor) -> Tensor:
    """Return an integer view of the parameter's memory, with at least one dimension."""
    numbers = parameter.detach().view(_INTEGERS[parameter.element_size()])
    return numbers if numbers.ndim else numbers.view(1)
