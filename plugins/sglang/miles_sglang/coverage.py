"""Which parameters of SGLang's model an update reached.

SGLang's models take what they are sent and say nothing about parameters that nothing was sent for: a model may have an output layer of its
own although its checkpoint ties it to the embedding. Such a parameter keeps the random numbers that it was started with. So before
the first update a few elements of every parameter get marks, and a parameter whose marks are all there afterwards was never written.
Marks are found however the model copies: in place, in threads, or into other memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: Elements of a parameter that are marked, evenly spaced.
_MARKS = 16
#: Integers of the same size as a dtype, because indexing does not know every dtype.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Ends of the names of parameters that SGLang sets itself: the scales of cached keys and values.
_CONSTANTS = (".k_scale", ".v_scale")
_EMBEDDING = re.compile(r"^(?:\w+\.)*?(?:embed_tokens|word_embeddings|tok_embeddings|wte)\.weight$")
#: The checkpoint's name of the output layer.
HEAD = "lm_head.weight"


class Coverage:
    """Marks in the parameters of a model that was not updated yet.

    Args:
        model: SGLang's; aliases of one memory count as one parameter, under the first name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._marked: dict[str, tuple[int, tuple[Tensor, ...], Tensor, Tensor]] = {}
        draw = torch.Generator().manual_seed(20)
        seen: set[tuple[int, tuple[int, ...]]] = set()
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
    def finish(self, model: nn.Module) -> list[str]:
        """Put what was before back where no update came.

        Returns:
            names of parameters that no element of was written, constants aside.
        """
        unwritten = []
        parameters = dict(model.named_parameters())
        for name, (memory, place, before, marks) in self._marked.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.data_ptr() != memory:  # in other memory, which was written
                continue
            numbers = _as_integers(parameter)
            left = numbers[place] == marks
            numbers[place] = torch.where(left, before, numbers[place])
            if bool(left.all()) and not name.endswith(_CONSTANTS):
                unwritten.append(name)
        self._marked.clear()
        return unwritten


def tied_head(model: Any, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The embedding under the name of the output layer, where the checkpoint ties the two and SGLang's model has both.

    Args:
        tensors: part of an update, by the checkpoint's names.

    Returns:
        what to load in addition: one entry, or nothing.
    """
    names = {name for name, _ in tensors}
    embedding = next(((name, t) for name, t in tensors if _EMBEDDING.match(name) and ".layers." not in name), None)
    if embedding is None or HEAD in names or not _ties(model):
        return []
    own = [
        name for name, _ in model.named_parameters() if name.endswith(HEAD)
    ]  # an alias is named once, as the embedding
    return [(HEAD, embedding[1])] if own else []


def _ties(model: Any) -> bool:
    """Whether the configuration of a model ties its output layer to its embedding."""
    config = getattr(model, "config", None)
    configs = (config, getattr(config, "text_config", None))
    return any(bool(getattr(each, "tie_word_embeddings", False)) for each in configs if each is not None)


def _as_integers(parameter: Tensor) -> Tensor:
    """A view of the parameter's memory, with one dimension at least."""
    numbers = parameter.detach().view(_INTEGERS[parameter.element_size()])
    return numbers if numbers.ndim else numbers.view(1)
