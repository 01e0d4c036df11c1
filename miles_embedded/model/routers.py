"""Find the routers of mixture-of-experts blocks by structure, independently of their names.

A mixture-of-experts block contains ``experts``, with their number, and a router: a child module that has, itself or in a submodule, a
matrix with one row per expert, whose product with a hidden state gives the logits. Usually the router's choice is passed to the experts
as ``experts(hidden, index, weights)``. Llama 4's experts instead compute every row for every expert, with rows weighted by the
router's scores, which are 0 for experts that were not chosen.
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
        block: the module that contains the router and the experts.
        router: child module of the block.
        scores: the router, or its submodule, whose output (or first output) is the logits.
        experts: the experts module.
        count: number of experts.
        top_k: experts per token if the router's scores weight the experts' input; 0 if the choice is passed to the experts.
    """

    block: nn.Module
    router: nn.Module
    scores: Any
    experts: nn.Module
    count: int
    top_k: int

    def on_logits(self, see: Callable[[Tensor], None]) -> None:
        """Call ``see`` with the logits [rows, experts] of every forward."""
        self.scores.register_forward_hook(lambda module, args, output: see(get_first(output)))

    def on_choice(self, see: Callable[[Tensor], None]) -> None:
        """Call ``see`` with the chosen experts [rows, k] of every forward."""
        if self.top_k:
            self.router.register_forward_hook(lambda module, args, output: see(output[0].topk(self.top_k)[1]))
        else:
            self.experts.register_forward_hook(lambda module, args, output: see(args[1]))


def routed_blocks(model: nn.Module) -> list[Routed]:
    """Return the routed blocks in the layers that a model runs, or in a part of a model, in order."""
    # skip additional layers that the model does not run
    running = decoder_layers(model) if isinstance(model, PreTrainedModel) else model
    return [found for module in running.modules() if (found := find_routed(module)) is not None]


def find_routed(block: nn.Module) -> Routed | None:
    """Return ``block`` as a ``Routed``; None if it does not route tokens to experts."""
    experts: Any = getattr(block, "experts", None)
    count = getattr(experts, "num_experts", None)
    if not isinstance(experts, nn.Module) or not isinstance(count, int):
        return None
    for child in block.children():
        scores = None if child is experts else next(_find_scores(child, count), None)
        if scores is not None:
            weighs = type(experts).__name__ == "Llama4TextExperts"
            return Routed(block, child, scores, experts, count, int(child.top_k) if weighs else 0)  # type: ignore[arg-type]
    return None


def _find_scores(router: nn.Module, count: int) -> Iterator[nn.Module]:
    """Yield the modules with one row per expert, if the router has no matrix with another number of rows. This excludes attention and
    dense MLPs next to experts."""
    found = [(m, w) for m in router.modules() if isinstance(w := getattr(m, "weight", None), Tensor) and w.dim() == 2]
    if all(len(weight) == count for _, weight in found):
        yield from (module for module, _ in found)


def get_first(output: Any) -> Tensor:
    """Return the tensor that a module returned, or the first of several."""
    return output if isinstance(output, Tensor) else output[0]
