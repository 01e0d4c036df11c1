"""One call of the model, as its modules see it.

Engine and trainer run the same Transformers modules. What differs is attention (a cache to extend, or packed sequences
that share prompts), so it is not in the modules: a ``Call`` travels through the model's keyword arguments and the
registered attention function asks it to attend. Because it is an argument, activation checkpointing hands the same call
to the recomputation, whatever thread that runs in.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_core.errors import ConfigError
from miles_embedded.model.indexer import Indexed, watch_indexer
from miles_embedded.model.sight import Choice, Sight, sight_of, window_mask

#: Key in ``Context.state``: keys and values are rounded to this type wherever they are attended to.
KV_DTYPE = "kv_dtype"
#: What a cache can keep them in, and the largest value it can hold (beyond it, they saturate).
KV_DTYPES = {"bfloat16": None, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


class Call(Protocol):
    """What attention and the layers need of one call."""

    ctx: Context

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float, sight: Sight | None = None
    ) -> Tensor:
        """query [1, heads, rows, dim], key and value [1, kv_heads, rows, dim] of the rows computed in this call ->
        [1, rows, heads, value_dim]. ``module.layer_idx`` says which layer asks, ``sight`` what it has beyond plain attention."""

    def choose(self, indexed: Indexed) -> Choice:
        """The keys that an indexer picks for the rows of this call, as a later ``attend`` of it wants them."""


_active = threading.local()


def active_context() -> Context | None:
    """The context of the decoder layer now running in this thread; None outside of a layer."""
    return getattr(_active, "ctx", None)


def watch_layers(backbone: nn.Module, layers: nn.ModuleList) -> None:
    """Make ``active_context()`` answer inside these layers, in the forward and in a recomputation alike.

    A recomputation calls a layer's ``forward`` without its hooks but its submodules with theirs, so the context is set where
    attention starts; every family attends before it routes.
    """
    for layer in layers:
        for child in layer.children():
            if "Attention" in type(child).__name__:
                child.register_forward_pre_hook(_enter, with_kwargs=True)
                indexer = getattr(child, "indexer", None)
                if indexer is not None:
                    child.register_forward_pre_hook(_with_mask, with_kwargs=True)
                    watch_indexer(indexer, lambda: _active.call)
    backbone.register_forward_hook(_leave, always_call=True)


def _enter(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    call = kwargs.get("call")
    _active.call, _active.ctx = call, None if call is None else call.ctx


def _with_mask(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Attention with an indexer reads its mask before it calls the attention function."""
    return args, kwargs | {"attention_mask": window_mask(0)}


def _leave(backbone: nn.Module, args: tuple, output: Any) -> None:
    _active.call = _active.ctx = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    call: Call | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with Transformers under the name ``miles``."""
    if call is None:
        raise RuntimeError("this model attends through a Call; pass call=... (see miles_embedded.model.call)")
    if kwargs.get("softcap") is not None:
        raise NotImplementedError(f"{type(module).__name__} uses attention with softcap, which is not supported yet")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if KV_DTYPE in call.ctx.state:
        key, value = (as_cached(x, call.ctx.state[KV_DTYPE]) for x in (key, value))
    return call.attend(module, query, key, value, scaling, sight_of(attention_mask, kwargs)), None


def as_cached(x: Tensor, dtype: str) -> Tensor:
    """``x`` rounded to what a cache of this type would hold (no scale), in its own dtype."""
    limit = KV_DTYPES[dtype]
    if limit is not None:
        x = x.clamp(-limit, limit)
    return x.to(getattr(torch, dtype)).to(x.dtype)


def check_kv_dtype(dtype: str) -> str:
    """``dtype``, or ConfigError when no cache keeps keys and values so; "" is the model's own."""
    if dtype and dtype not in KV_DTYPES:
        raise ConfigError(f"key/value cache dtype {dtype!r} is none of {', '.join(KV_DTYPES)}")
    return dtype


def no_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask function registered under the same name: a Call knows who sees whom, but not how wide a layer's window is."""
    return None if local_size is None else window_mask(local_size)
