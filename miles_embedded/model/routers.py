"""Routers, found by what they are and not by what a family calls them.

A mixture-of-experts block holds ``experts``, which know their number, and beside them a router: a module that has, itself or inside,
a matrix with one row an expert. Its product with a hidden state are the logits. The usual router's choice arrives at the experts as
``experts(hidden, index, weights)``. Llama 4's experts compute every row once an expert, and the router's scores, 0 for those that
were not chosen, weigh these rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from miles_embedded.model.load import decoder_layers


@dataclass(frozen=True, eq=False)
class Routed:
    """A block that routes tokens to experts.

    Attributes:
        block: what holds the router and the experts.
        router: the child of the block.
        scores: the router, or the layer in it, whose output are the logits, alone or first.
        experts: the experts.
        count: how many experts there are.
        top_k: experts a token where the router's scores weigh the experts' input; 0 where the experts are given the choice.
    """

    block: nn.Module
    router: nn.Module
    scores: Any
    experts: nn.Module
    count: int
    top_k: int

    def on_logits(self, see: Callable[[Tensor], None]) -> None:
        """Have ``see`` called with the logits [rows, experts] of every call."""
        self.scores.register_forward_hook(lambda module, args, output: see(first(output)))

    def on_choice(self, see: Callable[[Tensor], None]) -> None:
        """Have ``see`` called with the chosen experts [rows, k] of every call."""
        if self.top_k:
            self.router.register_forward_hook(lambda module, args, output: see(output[0].topk(self.top_k)[1]))
        else:
            self.experts.register_forward_hook(lambda module, args, output: see(args[1]))


def routed_blocks(model: nn.Module) -> list[Routed]:
    """Every block with routed experts in the layers that a model runs, or in a part of a model, in order."""
    # a model may have layers behind its own that it does not run
    running = decoder_layers(model) if isinstance(model, PreTrainedModel) else model
    return [found for module in running.modules() if (found := routed(module)) is not None]


def routed(block: nn.Module) -> Routed | None:
    """``block`` as what routes tokens to experts; None where it does not."""
    experts: Any = getattr(block, "experts", None)
    count = getattr(experts, "num_experts", None)
    if not isinstance(experts, nn.Module) or not isinstance(count, int):
        return None
    for child in block.children():
        scores = None if child is experts else next(_scoring(child, count), None)
        if scores is not None:
            weighs = type(experts).__name__ == "Llama4TextExperts"
            return Routed(block, child, scores, experts, count, int(child.top_k) if weighs else 0)  # type: ignore[arg-type]
    return None


def _scoring(router: nn.Module, count: int) -> Iterator[nn.Module]:
    """Modules with one row an expert, where the module holds no matrix of another number of rows: an attention or a dense MLP
    beside experts has many."""
    found = [(m, w) for m in router.modules() if isinstance(w := getattr(m, "weight", None), Tensor) and w.dim() == 2]
    if all(len(weight) == count for _, weight in found):
        yield from (module for module, _ in found)


def first(output: Any) -> Tensor:
    """The tensor that a module returned, or the first of several."""
    return output if isinstance(output, Tensor) else output[0]
