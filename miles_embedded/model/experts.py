"""The experts and routers of mixture-of-experts layers. The experts are registered in Transformers' experts interface.

Standard experts are one operation of the model's table (``operations``). All others (biases, transposed weights, another gate, rows
rounded by a number format in front of a product) use the individual steps of ``grouped_experts.py``.

Routers are found by structure, independently of their names. A mixture-of-experts block contains ``experts``, with their number, and a
router: a child module that has, itself or in a submodule, a matrix with one row per expert, whose product with a hidden state gives the
logits. Usually the router's choice is passed to the experts as ``experts(hidden, index, weights)``. Llama 4's experts instead compute
every row for every expert, with rows weighted by the router's scores, which are 0 for experts that were not chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.integrations import moe

from miles_embedded.kernels.available import kernels_run
from miles_embedded.model.grouped_experts import (
    INPUT_ROUNDING,
    combine,
    dispatch,
    grouped_linear,
    uses_grouped_product,
)
from miles_embedded.model.operations import operations_of
from miles_embedded.model.parts import decoder_layers, put_forward
from miles_embedded.model.sorted_choices import SortedChoices, sort_choices

#: Attribute of a module whose weights are divided among devices (``quantized.divided``); usually absent.
DIVIDED = "divided_experts"
_SILU = type(ACT2FN["silu"])


def grouped_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Forward of a Transformers experts module.

    Args:
        module: module with ``gate_up_proj`` (or ``up_proj``) and ``down_proj`` [experts, out, in], or [experts, in, out] if
            ``is_transposed``, and with biases if ``has_bias``.
        hidden_states: [rows, hidden].
        top_k_index: [rows, k] int64.
        top_k_weights: [rows, k].

    Returns:
        [rows, hidden].
    """
    if (divided := module.__dict__.get(DIVIDED)) is not None:
        found: Tensor = divided(hidden_states, top_k_index, top_k_weights)
        return found
    rounding = getattr(module, INPUT_ROUNDING, None)
    if rounding is not None and not rounding.enabled:
        rounding = None
    if rounding is None and is_standard(module, hidden_states.dtype):
        experts = operations_of(module).experts
        return experts(hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj)
    native = None if rounding is None else rounding.native
    if native is not None and hidden_states.dtype == native.product.dtype and hidden_states.numel():
        emulated = partial(_standard_experts, module, rounding)
        return native(hidden_states, top_k_index, top_k_weights, emulated)
    one = uses_grouped_product(hidden_states, top_k_index, module.down_proj)
    choices = sort_choices(top_k_index, module.num_experts, counted=not one)
    expert = partial(_expert_of, top_k_index, choices)
    x = _project_up(module, hidden_states, choices, rounding, expert)
    if rounding is not None:
        x = rounding("down_proj", x, expert)
    x = _project(module, "down_proj", x, choices)
    if getattr(module, "has_post_expert_norm", False):
        x = module.post_expert_norm(x)
    return combine(x, top_k_weights, choices).to(hidden_states.dtype)


def _standard_experts(
    module: Any, rounding: Any, hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Compute standard experts, whose inputs are all rounded, with weights other than the module's."""
    choices = sort_choices(index, len(down), counted=not uses_grouped_product(hidden, index, down))
    expert = partial(_expert_of, index, choices)
    x = grouped_linear(dispatch(rounding("gate_up_proj", hidden, expert), choices), gate_up, choices)
    x = grouped_linear(rounding("down_proj", _gate(module, x), expert), down, choices)
    return combine(x, weights, choices).to(hidden.dtype)


def round_inputs(module: Any, rounding: Any) -> None:
    """Make the products of an experts module read rows rounded by ``rounding`` (``quantized.activation``)."""
    if type(module).__name__ == "Llama4TextExperts":
        from miles_embedded.model.stacked_experts import stacked_experts  # imports a model definition that few runs use

        put_forward(module, stacked_experts)
    module.__dict__[INPUT_ROUNDING] = rounding


def _project_up(module: Any, hidden: Tensor, choices: SortedChoices, rounding: Any, expert: Any) -> Tensor:
    """Compute the inputs of the second product: [rows, hidden] -> [rows * k, inner], sorted by expert."""
    gated = getattr(module, "has_gate", True)
    up = "gate_up_proj" if gated else "up_proj"
    if rounding is None:
        x = dispatch(hidden, choices)
    elif rounding.rounds_all(up):
        x = dispatch(rounding(up, hidden, expert), choices)  # round once per row instead of once per choice
    else:
        x = rounding(up, dispatch(hidden, choices), expert)
    x = _project(module, up, x, choices)
    return _gate(module, x) if gated else module.act_fn(x)


def _gate(module: Any, x: Tensor) -> Tensor:
    """Compute the inputs of the second product from the joined results of the first; one launch for standard experts on a GPU."""
    if kernels_run(x.device) and operations_of(module).gate is not None and is_standard(module, x.dtype):
        from miles_embedded.kernels.swiglu import swiglu_of_halves

        return swiglu_of_halves(x)
    gated: Tensor = module._apply_gate(x)
    return gated


def _expert_of(index: Tensor, choices: SortedChoices) -> Tensor:
    """[rows * k] expert index of each sorted position."""
    return index.reshape(-1).index_select(0, choices.order)


def _project(module: Any, name: str, x: Tensor, choices: SortedChoices) -> Tensor:
    bias = getattr(module, f"{name}_bias") if getattr(module, "has_bias", False) else None
    return grouped_linear(x, getattr(module, name), choices, bias, getattr(module, "is_transposed", False))


def is_standard(module: Any, dtype: torch.dtype) -> bool:
    """Whether these are standard experts: ``down(silu(gate) * up)`` in one dtype, stored [out, in], gate first, without biases."""
    return (
        getattr(module, "has_gate", True)
        and getattr(module, "is_concatenated", True)
        and not getattr(module, "is_transposed", False)
        and not getattr(module, "has_bias", False)
        and not getattr(module, "has_post_expert_norm", False)
        and type(module)._apply_gate is moe._default_apply_gate
        and isinstance(module.act_fn, (nn.SiLU, _SILU))
        and dtype == module.gate_up_proj.dtype == module.down_proj.dtype
    )


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
