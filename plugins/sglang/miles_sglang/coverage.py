"""Detects parameters of SGLang's model that an update did not write.

SGLang loads the tensors it receives and does not report parameters without one. For example, a model may have a separate output layer
although the checkpoint ties it to the embedding; that parameter would keep its random initial values. Before the first update a few
elements of every parameter are therefore overwritten with marks. A parameter that still has all its marks afterwards was not written.
This works however the model copies: in place, in threads, or into new memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: Marked elements of a parameter, evenly spaced.
_MARKS = 16
#: Element size -> integer dtype of that size, because indexing does not support every dtype.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Name suffixes of parameters that SGLang sets itself: the scales of cached keys and values.
_CONSTANTS = (".k_scale", ".v_scale")
#: SGLang's class -> name suffixes of parameters that it creates and does not use (0.5.17).
_UNUSED = {"FalconH1ForCausalLM": (".q_norm.weight", ".k_norm.weight")}
_EMBEDDING = re.compile(r"^(?:\w+\.)*?(?:embed_tokens|word_embeddings|tok_embeddings|wte)\.weight$")
#: The checkpoint's name of the output layer.
HEAD = "lm_head.weight"


class Coverage:
    """Writes marks to all parameters of a model when created, and finds the parameters that the first update did not write.

    Args:
        model: SGLang's model; parameters that share memory count once, under the first name.
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
        """Restore the marked elements that no update wrote.

        Returns:
            names of parameters that were not written at all, without constants and without those that SGLang does not use.
        """
        unwritten, ignored = [], (*_CONSTANTS, *_UNUSED.get(type(model).__name__, ()))
        parameters = dict(model.named_parameters())
        for name, (memory, place, before, marks) in self._marked.items():
            parameter = parameters.get(name)
            if parameter is None or parameter.data_ptr() != memory:  # replaced by new memory, so it was written
                continue
            numbers = _as_integers(parameter)
            left = numbers[place] == marks
            numbers[place] = torch.where(left, before, numbers[place])
            if bool(left.all()) and not name.endswith(ignored):
                unwritten.append(name)
        self._marked.clear()
        return unwritten


def tied_head(model: Any, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the embedding under the name of the output layer if the checkpoint ties the two and SGLang's model has both.

    Args:
        model: SGLang's model.
        tensors: part of an update, under the checkpoint's names.

    Returns:
        the tensors to load in addition: one or none.
    """
    names = {name for name, _ in tensors}
    embedding = next(((name, t) for name, t in tensors if _EMBEDDING.match(name) and ".layers." not in name), None)
    if embedding is None or HEAD in names or not _ties(model):
        return []
    # named_parameters lists a shared parameter once, as the embedding
    own = [name for name, _ in model.named_parameters() if name.endswith(HEAD)]
    return [(HEAD, embedding[1])] if own else []


def _ties(model: Any) -> bool:
    """Whether the model's configuration ties the output layer to the embedding."""
    config = getattr(model, "config", None)
    configs = (config, getattr(config, "text_config", None))
    return any(bool(getattr(each, "tie_word_embeddings", False)) for each in configs if each is not None)


def _as_integers(parameter: Tensor) -> Tensor:
    """Return an integer view of the parameter's memory, with at least one dimension."""
    numbers = parameter.detach().view(_INTEGERS[parameter.element_size()])
    return numbers if numbers.ndim else numbers.view(1)
