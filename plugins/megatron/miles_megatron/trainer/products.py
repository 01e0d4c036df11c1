"""Faster GEMMs in TransformerEngine's linear layers on a GPU: in-place accumulation of weight gradients, and grouped GEMMs for experts.

Megatron-Core stores gradients in one FP32 buffer. A GEMM that accumulates into it saves a BF16 copy of each weight gradient, its rounding,
and an addition. TransformerEngine multiplies experts one after another and searches for the best library kernel for each GEMM, which
takes longer than the GEMM for small experts; torch's grouped GEMM is one kernel for all experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from miles_megatron.sizes import Sizes


def add_gradients_in_place(chunks: Sequence[nn.Module]) -> None:
    """Make TransformerEngine's layers accumulate weight gradients into ``main_grad``.

    Megatron-Core's own layers (embedding and output layer) would need APEX for this and are unchanged."""
    for module in _modules(chunks, "fuse_wgrad_accumulation"):
        module.fuse_wgrad_accumulation = True


def multiply_experts_together(chunks: Sequence[nn.Module], notify: bool) -> None:
    """Use torch's grouped GEMM in expert layers without biases. For BF16 only, because TransformerEngine's recipes quantise inside its
    own GEMMs.

    Args:
        chunks: the chunks, not wrapped.
        notify: return weight gradients to autograd too, so that Megatron-Core's hooks can overlap their reduction with computation.
    """
    for module in _modules(chunks, "num_gemms"):
        if not module.use_bias:
            module.forward = _Forward(module, notify)


def sort_once(chunks: Sequence[nn.Module], s: Sizes) -> None:
    """Skip the token dispatcher's second sort if each rank has all experts.

    The rows are then already sorted by expert; the second sort is needed only after an exchange among expert-parallel ranks."""
    if s.ep == s.etp == 1:
        for dispatcher in (module.token_dispatcher for module in _modules(chunks, "token_dispatcher")):
            if hasattr(dispatcher, "sort_input_by_local_experts"):
                dispatcher.num_local_experts = 1


def _modules(chunks: Sequence[nn.Module], attribute: str) -> Iterator[Any]:
    return (module for chunk in chunks for module in chunk.modules() if hasattr(module, attribute))


class _Forward:
    """Replaces the forward method of TransformerEngine's ``GroupedLinear``, with the signature that Megatron-Core uses."""

    def __init__(self, module: Any, notify: bool) -> None:
        self.module, self.notify = module, notify

    def __call__(self, x: Tensor, counts: Sequence[int]) -> tuple[Tensor, None]:
        """Return ([rows, out], None for the bias). x: [rows, in] sorted by expert; counts: number of rows of each expert."""
        weights = [getattr(self.module, f"weight{i}") for i in range(self.module.num_gemms)]
        in_place = self.module.fuse_wgrad_accumulation
        return GroupedProduct.apply(x, tuple(counts), in_place, self.notify or not in_place, *weights), None


class GroupedProduct(torch.autograd.Function):
    """Multiply each expert's rows with its weight, in one kernel.

    Args:
        x: [rows, in], sorted by expert.
        counts: number of rows of each expert.
        in_place: accumulate weight gradients into the weights' ``main_grad``.
        notify: return weight gradients to autograd.
        weights: [out, in] for each expert.

    Returns:
        [rows, out].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], in_place: bool, notify: bool, *weights: Tensor) -> Tensor:
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        ctx.save_for_backward(x, ends)
        ctx.counts, ctx.in_place, ctx.notify, ctx.weights = counts, in_place, notify, weights
        return functional.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, ends = ctx.saved_tensors
        grad, weights = grads[0].contiguous(), ctx.weights
        to_x = functional.grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        nothing = [None] * len(weights)
        if not ctx.needs_input_grad[4]:
            return to_x, None, None, None, *nothing
        to_weights = functional.grouped_mm(grad.t(), x, offs=ends)
        for expert in (i for i, count in enumerate(ctx.counts) if not count):
            to_weights[expert] = 0  # the kernel may not write the gradients of experts without rows
        if ctx.in_place:
            torch._foreach_add_([weight.main_grad for weight in weights], list(to_weights.float().unbind()))
            for weight in weights:
                weight.grad_added_to_main_grad = True  # Megatron-Core then discards autograd's gradient
        return to_x, None, None, None, *(to_weights.unbind() if ctx.notify else nothing)
