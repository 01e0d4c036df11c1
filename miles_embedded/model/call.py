"""One call of the model, as its modules see it.

Engine and trainer run the same Transformers modules. What differs is attention (a cache to extend, or packed sequences
that share prompts), so it is not in the modules: a ``Call`` travels through the model's keyword arguments and the
registered attention function asks it to attend. Because it is an argument, activation checkpointing hands the same call
to the recomputation, whatever thread that runs in.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_embedded.model.attention import AttentionOptions, ChosenKeys, window_mask
from miles_embedded.model.indexer import Indexed, watch_indexer


class Call(Protocol):
    """What attention and the layers need of one call."""

    ctx: Context

    @property
    def longest(self) -> int:
        """The most keys that a row of this call has, itself included."""

    @property
    def positions(self) -> Tensor:
        """[rows] position of each row in its sequence."""

    @property
    def spans(self) -> np.ndarray:
        """[rows] on the host: how long the sequence is that each row's rotary frequencies are taken for."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """The attention of one layer, by torch.

        Args:
            module: the layer's attention; ``module.layer_idx`` says which layer it is.
            query: [1, heads, rows, dim] of the rows computed in this call.
            key: [1, kv heads, rows, dim], likewise.
            value: [1, kv heads, rows, value dim], likewise.
            scaling: of the scores.
            options: what the layer has beyond plain causal attention; a window is shorter than ``longest``.

        Returns:
            [1, rows, heads, value dim].
        """

    def choose(self, indexed: Indexed) -> ChosenKeys:
        """The keys that an indexer picks for the rows of this call, as a later ``attend`` of it wants them."""


_active = threading.local()


def active_context() -> Context | None:
    """The context of the decoder layer now running in this thread; None outside of a layer."""
    return getattr(_active, "ctx", None)


def active_call() -> Call | None:
    """The call that the model now runs in this thread; None outside of one."""
    return getattr(_active, "call", None)


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
    backbone.register_forward_pre_hook(_begin, with_kwargs=True)
    backbone.register_forward_hook(_leave, always_call=True)


def _begin(backbone: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    _active.call = kwargs.get("call")


def _enter(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    call = kwargs.get("call")
    _active.call, _active.ctx = call, None if call is None else call.ctx


def _with_mask(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Attention with an indexer reads its mask before it calls the attention function."""
    if active_call() is None:
        return args, kwargs
    return args, kwargs | {"attention_mask": window_mask(0)}


def _leave(backbone: nn.Module, args: tuple, output: Any) -> None:
    _active.call = _active.ctx = None
