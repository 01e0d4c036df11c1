"""SGLang's recording of routed experts and its adapters on a machine without CUDA, as a plugin of SGLang (``sglang.srt.plugins``).

SGLang 0.5.17 keeps recorded experts, and indices of adapters, in pinned host memory, which torch can only allocate next to an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def install() -> None:
    """Use ordinary memory. SGLang calls this in each of its processes before it starts."""
    from sglang.srt.state_capturer import base

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    base.BaseHostCache.__init__ = allocate_unpinned


def without_pinning(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes the tensors of ``make`` whatever ``pin_memory`` says."""

    @wraps(make)
    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
        return make(*args, **options)

    return unpinned


def allocate_unpinned(cache: Any, num_tokens: int, num_layers: int, topk_size: int, name: str) -> None:
    """``BaseHostCache.__init__`` with a buffer [tokens, layers, top-k] int32 that is not pinned."""
    cache.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    cache.num_tokens, cache.num_layers, cache.topk_size, cache.name = num_tokens, num_layers, topk_size, name
    cache._log_allocation()
