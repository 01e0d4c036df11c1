"""Table of the operations of a model that the GPU kernels (``miles_embedded.kernels``) compute."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from miles_embedded.kernels.available import kernels_run
from miles_embedded.model.grouped_experts import swiglu_experts, uses_grouped_product
from miles_embedded.model.operations import Operations, operations_of, use_operations


def use_kernels(model: nn.Module) -> None:
    """Make a model on a GPU compute its norms, rotations, gates, experts, delta nets and log-probabilities with these kernels if Triton is
    installed."""
    device = next(model.parameters()).device
    if kernels_run(device):
        from miles_embedded.kernels.delta_rule import advance_delta_rule
        from miles_embedded.kernels.log_probs import log_probs

        table = replace(with_row_kernels(operations_of(model)), experts=_experts, log_probs=log_probs)
        use_operations(model, replace(table, delta_rule=advance_delta_rule))


def with_row_kernels(table: Operations) -> Operations:
    """Return ``table`` with the kernels of norms, rotations, gates (of experts, too) and routers, which compute each row by itself. Triton has to
    be installed."""
    from miles_embedded.kernels.norm import rms_norm
    from miles_embedded.kernels.rotation import rotate
    from miles_embedded.kernels.swiglu import swiglu, swiglu_of_halves

    experts = partial(swiglu_experts, gate=swiglu_of_halves)
    return replace(table, norm=rms_norm, rotation=rotate, gate=swiglu, route=route, experts=experts)


def _experts(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See ``grouped_experts.swiglu_experts``."""
    from miles_embedded.kernels.experts import experts, fits

    if fits(hidden, index) and hidden.dtype == torch.bfloat16 and uses_grouped_product(hidden, index, down):
        return experts(hidden, index, weights, gate_up, down)
    if hidden.is_cuda:
        from miles_embedded.kernels.swiglu import swiglu_of_halves

        return swiglu_experts(hidden, index, weights, gate_up, down, swiglu_of_halves)
    return swiglu_experts(hidden, index, weights, gate_up, down)


def route(logits: Tensor, k: int, normalized: bool, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See ``Operations.route``."""
    if logits.is_cuda:
        from miles_embedded.kernels.route import can_choose, choose

        if can_choose(logits, k):
            return choose(logits, k, normalized, given)
    share = logits.softmax(-1, dtype=torch.float32)
    weights, index = share.topk(k, dim=-1)
    if given is not None:
        weights = share.gather(-1, given.long())
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), index
