"""Products of MoE routers whose weights are FP32 in a BF16 model.

Megatron-Core multiplies in FP32 with BF16 operands (``moe_router_dtype``). Some families keep the router's weight in FP32 if the checkpoint
stores it so (``Experts.wide_router``). TransformerEngine's product, which Megatron-Core calls on a GPU, has no operands of two types and
would round FP32 ones to TF32, so torch computes these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router import Router
from torch import Tensor, nn


def find_routers(module: nn.Module) -> Iterator[Any]:
    """Yield the routers in a module."""
    yield from (each for each in module.modules() if isinstance(each, Router))


def allow_wide_weights(module: nn.Module) -> None:
    """Let the routers in a module multiply with weights in FP32."""
    for router in find_routers(module):
        router.gating = partial(_multiply, router, router.gating)


def _multiply(router: Any, gating: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    weight: Tensor = router.weight
    if weight.dtype == x.dtype:
        return gating(x)
    logits: Tensor = _Product.apply(x, weight)
    return logits


class _Product(torch.autograd.Function):
    """``x.float() @ weight.t()``, which keeps ``x`` in its own type for the backward pass. x: [..., hidden]; weight: [experts, hidden] FP32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.float() @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        return (grad @ weight).to(x.dtype), grad.flatten(0, -2).t() @ x.flatten(0, -2).float()
