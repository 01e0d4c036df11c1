"""A context in which torch's functions depend on no other row of a batch.

The forward of the modules passed to ``compute_inside`` runs in it, so that every product and every function that a family's code calls is
replaced, whichever module calls it: linear layers, routers, experts, a format's fake-quantised products. The backward pass is torch's own:
gradients need not be the same for every batch, only the policy has to be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from miles_true_on_policy import products
from miles_true_on_policy.elementwise import apply_aligned
from miles_true_on_policy.products import add_product, multiply, multiply_groups, multiply_rows, sum_rows

#: Elementwise functions that torch computes in two ways; see ``elementwise``.
ELEMENTWISE: tuple[Any, ...] = (
    functional.silu,
    functional.gelu,
    functional.softplus,
    functional.mish,
    functional.elu,
    functional.sigmoid,
    functional.logsigmoid,
    functional.tanh,
    torch.sigmoid,
    torch.tanh,
    torch.exp,
    torch.pow,
    torch.rsqrt,
    torch.cos,
    torch.sin,
    torch.Tensor.sigmoid,
    torch.Tensor.tanh,
    torch.Tensor.exp,
    torch.Tensor.pow,
    torch.Tensor.__pow__,
    torch.Tensor.rsqrt,
    torch.Tensor.cos,
    torch.Tensor.sin,
)
PRODUCTS: tuple[Any, ...] = (
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
)
REPLACED: dict[Any, Callable[..., Any]] = {
    **{function: partial(apply_aligned, function) for function in ELEMENTWISE},
    **dict.fromkeys(PRODUCTS, multiply),
    functional.linear: multiply_rows,
}
REPLACED |= dict.fromkeys((torch.Tensor.addmm_, torch.Tensor.baddbmm_), add_product)
if hasattr(torch, "_grouped_mm"):  # what torch.nn.functional.grouped_mm calls
    REPLACED[torch._grouped_mm] = multiply_groups
if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # of the embedded experts, on processors for which oneDNN is faster
    REPLACED[torch.ops.mkldnn._linear_pointwise] = lambda x, weight, bias, *fused: multiply_rows(x, weight, bias)


def _reduce(function: Callable[..., Any], mean: bool, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch.sum`` or ``torch.mean``; over one dimension of a tensor on a GPU with one program per result."""
    dim = kwargs.get("dim", args[0] if args else None)
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    keep = kwargs.get("keepdim", args[1] if len(args) > 1 else False)
    plain = len(args) <= 2 and kwargs.keys() <= {"dim", "keepdim"}
    if not plain or not isinstance(dim, int) or not products.uses_kernels(x) or x.dtype not in _HALF_AND_FLOAT:
        return function(x, *args, **kwargs)
    total = sum_rows(x.float(), dim).unsqueeze(dim)
    found = (total / x.shape[dim] if mean else total).to(x.dtype)
    return found if keep else found.squeeze(dim)


def _choose_largest(function: Callable[..., Any], x: Any, k: int, *args: Any, **kwargs: Any) -> Any:
    """Call ``torch.topk``; on a GPU in the order of a stable sort, since topk leaves the order of equal entries to the number of rows."""
    dim = kwargs.get("dim", args[0] if args else -1)
    largest = kwargs.get("largest", args[1] if len(args) > 1 else True)
    if not products.uses_kernels(x):
        return function(x, k, *args, **kwargs)
    from miles_true_on_policy.choice import can_choose, largest_entries

    if largest and dim in (-1, x.dim() - 1) and can_choose(x, k):
        return torch.return_types.topk(largest_entries(x, k))
    values, index = x.sort(dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), index.narrow(dim, 0, k)))


_HALF_AND_FLOAT = (torch.bfloat16, torch.float16, torch.float32)
REPLACED |= {f: partial(_choose_largest, f) for f in (torch.topk, torch.Tensor.topk)}
REPLACED |= {f: partial(_reduce, f, False) for f in (torch.sum, torch.Tensor.sum)}
REPLACED |= {f: partial(_reduce, f, True) for f in (torch.mean, torch.Tensor.mean)}


class Invariant(TorchFunctionMode):
    """Replaces the functions of ``REPLACED`` while it is entered, in this thread."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the replacement of ``func``, or ``func``."""
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


def skip_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that calls none of ``REPLACED``, so that the mode sees none of its calls: each costs microseconds of the host."""

    @wraps(function)
    def call(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args)

    return call


_state = threading.local()


def compute_inside(module: nn.Module) -> None:
    """Run the forward of ``module``, and everything that it calls, in ``Invariant``."""
    module.register_forward_pre_hook(_enter)
    module.register_forward_hook(_leave, always_call=True)


def _enter(module: nn.Module, args: Any) -> None:
    _state.depth = getattr(_state, "depth", 0) + 1
    if _state.depth == 1:
        _state.mode = Invariant()
        _state.mode.__enter__()


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _state.depth -= 1
    if _state.depth == 0:
        _state.mode.__exit__(None, None, None)
