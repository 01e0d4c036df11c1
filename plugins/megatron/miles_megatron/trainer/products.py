"""The products of TransformerEngine's linear layers on a GPU: weight gradients that are added where they are kept, and one product for
all experts of a matrix.

Megatron-Core keeps gradients in one FP32 buffer. A product that adds to it saves a BF16 copy of every weight gradient, its rounding and
an addition a weight. TransformerEngine multiplies experts one after another, each product with a search for the library's best kernel,
which takes longer than the product where experts are small; torch's grouped product is one kernel for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from miles_megatron.sizes import Sizes


def add_gradients_in_place(chunks: Sequence[nn.Module]) -> None:
    """Weight gradients of TransformerEngine's layers are added to ``main_grad`` by their products. Megatron-Core's own layers, the
    embedding and the output layer, would want APEX for it and stay as they are."""
    for module in _modules(chunks, "fuse_wgrad_accumulation"):
        module.fuse_wgrad_accumulation = True


def multiply_experts_together(chunks: Sequence[nn.Module], told: bool) -> None:
    """Layers of experts without biases multiply with torch's grouped product. For BF16 only: TransformerEngine's recipes quantise
    inside of its own products.

    Args:
        chunks: not wrapped.
        told: Megatron-Core wants to be told of each weight gradient, to reduce it while others are computed.
    """
    for module in _modules(chunks, "num_gemms"):
        if not module.use_bias:
            module.forward = _Forward(module, told)


def sort_once(chunks: Sequence[nn.Module], s: Sizes) -> None:
    """Where a rank has all experts, rows are sorted by expert when they are collected, and what an exchange among ranks would have mixed
    up is not sorted again."""
    if s.ep == s.etp == 1:
        for dispatcher in (module.token_dispatcher for module in _modules(chunks, "token_dispatcher")):
            if hasattr(dispatcher, "sort_input_by_local_experts"):
                dispatcher.num_local_experts = 1


def _modules(chunks: Sequence[nn.Module], attribute: str) -> Iterator[Any]:
    return (module for chunk in chunks for module in chunk.modules() if hasattr(module, attribute))


class _Forward:
    """Takes the place of the forward method of TransformerEngine's ``GroupedLinear`` as Megatron-Core calls it."""

    def __init__(self, module: Any, told: bool) -> None:
        self.module, self.told = module, told

    def __call__(self, x: Tensor, counts: Sequence[int]) -> tuple[Tensor, None]:
        """[rows, in] sorted by expert, with the number of rows of each -> [rows, out], and no bias."""
        weights = [getattr(self.module, f"weight{i}") for i in range(self.module.num_gemms)]
        in_place = self.module.fuse_wgrad_accumulation
        return GroupedProduct.apply(x, tuple(counts), in_place, self.told or not in_place, *weights), None


class GroupedProduct(torch.autograd.Function):
    """Each expert's product with its own rows, all in one kernel.

    Args:
        x: [rows, in], sorted by expert.
        counts: rows of each expert.
        in_place: weight gradients are added to the weights' ``main_grad``.
        told: autograd gets them too.
        weights: [out, in] of each expert.

    Returns:
        [rows, out].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], in_place: bool, told: bool, *weights: Tensor) -> Tensor:
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        ctx.save_for_backward(x, ends)
        ctx.counts, ctx.in_place, ctx.told, ctx.weights = counts, in_place, told, weights
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
            to_weights[expert] = 0  # a kernel may leave alone what it has no rows for
        if ctx.in_place:
            torch._foreach_add_([weight.main_grad for weight in weights], list(to_weights.float().unbind()))
            for weight in weights:
                weight.grad_added_to_main_grad = True  # Megatron-Core then drops the gradient that autograd has
        return to_x, None, None, None, *(to_weights.unbind() if ctx.told else nothing)
