"""The steps of a model by the kernels of this package, as a table of operations."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from miles_core.errors import first_line
from miles_embedded.model.grouped_experts import swiglu_experts, uses_grouped_product
from miles_embedded.model.operations import operations_of, use_operations

log = logging.getLogger(__name__)


def use_kernels(model: nn.Module) -> None:
    """Let a model on a GPU compute its norms, rotations, gates and experts with these kernels, as far as Triton is installed."""
    device = next(model.parameters()).device
    if kernels_run(device):
        from miles_embedded.kernels.norm import rms_norm
        from miles_embedded.kernels.rotation import rotate
        from miles_embedded.kernels.swiglu import swiglu

        table = replace(
            operations_of(model), norm=rms_norm, rotation=rotate, gate=swiglu, route=_route, experts=_experts
        )
        use_operations(model, table)


@cache
def kernels_run(device: torch.device) -> bool:
    """Whether kernels can be compiled and run there; the log says why they cannot."""
    if device.type != "cuda":
        return False
    if importlib.util.find_spec("triton") is None:
        log.info("Triton is not installed: steps that have a kernel are computed by torch")
        return False
    try:
        from miles_embedded.kernels.swiglu import swiglu

        swiglu(*torch.zeros(2, 1, 16, device=device, dtype=torch.bfloat16))
    except Exception as error:  # a missing compiler, an old driver, a GPU that Triton does not know
        log.warning("Triton cannot run here, so steps that have a kernel are computed by torch: %s", first_line(error))
        return False
    return True


def _experts(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See ``grouped_experts.swiglu_experts``."""
    from miles_embedded.kernels.experts import experts, fits

    if fits(hidden, index) and hidden.dtype == torch.bfloat16 and uses_grouped_product(hidden, index, down):
        return experts(hidden, index, weights, gate_up, down)
    if hidden.is_cuda:
        from miles_embedded.kernels.swiglu import swiglu

        return swiglu_experts(hidden, index, weights, gate_up, down, swiglu)
    return swiglu_experts(hidden, index, weights, gate_up, down)


def _route(logits: Tensor, k: int, normalized: bool) -> tuple[Tensor, Tensor]:
    """See ``Operations.route``."""
    from miles_embedded.kernels.route import choose, chooses

    if logits.is_cuda and chooses(logits, k):
        return choose(logits, k, normalized)
    weights, index = logits.softmax(-1, dtype=torch.float32).topk(k, dim=-1)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), index
