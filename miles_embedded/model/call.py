"""One forward call of the model.

Engine and trainer run the same Transformers modules. They differ in attention (a cache to extend, or packed sequences that share
prompts), so attention is not part of the modules: a ``Call`` is passed through the model's keyword arguments, and the registered
attention function delegates to it. Because it is an argument, activation checkpointing passes the same call to the recomputation in
any thread.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from miles_core.contracts.trainer import Context
from miles_embedded.model.attention import AttentionOptions, ChosenKeys, window_mask
from miles_embedded.model.indexer import Indexed, watch_indexer
from miles_embedded.model.states import Advance, use_states


class Call(Protocol):
    """Interface of a forward call for attention and layers."""

    ctx: Context

    @property
    def longest(self) -> int:
        """Upper bound on the keys of a row, its own included."""

    @property
    def positions(self) -> Tensor:
        """[rows] index of each row in its sequence."""

    @property
    def spans(self) -> np.ndarray:
        """[rows] on the host: sequence length that determines each row's rotary frequencies."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        options: AttentionOptions | None = None,
    ) -> Tensor:
        """Compute the attention of one layer with torch.

        Args:
            module: the layer's attention module; ``module.layer_idx`` is the layer's index.
            query: [1, heads, rows, dim] for the rows of this call.
            key: [1, kv heads, rows, dim].
            value: [1, kv heads, rows, value dim].
            scaling: factor on the scores.
            options: options beyond plain causal attention; a window is shorter than ``longest``.

        Returns:
            [1, rows, heads, value dim].
        """

    def advance(self, module: nn.Module, hidden: Tensor, compute: Advance) -> Tensor:
        """Compute a layer that keeps a state between tokens, sequence by sequence.

        Args:
            module: the layer's module with the state; ``module.layer_idx`` is the layer's index.
            hidden: [1, rows, hidden] for the rows of this call.
            compute: computes the layer for batches of sequences, see ``states.Advance``.

        Returns:
            [1, rows, hidden].
        """

    def choose(self, indexed: Indexed) -> ChosenKeys:
        """Choose keys for the rows of this call with an indexer, in the form that ``attend`` of the same call expects."""


_active = threading.local()


def active_context() -> Context | None:
    """Context of the decoder layer that runs in this thread; None outside a layer."""
    return getattr(_active, "ctx", None)


def active_call() -> Call | None:
    """Call that the model runs in this thread; None outside a forward pass."""
    return getattr(_active, "call", None)


def watch_layers(backbone: nn.Module, layers: nn.ModuleList) -> None:
    """Make ``active_context()`` valid inside these layers, in the forward pass and in recomputation.

    Recomputation calls a layer's ``forward`` without the layer's hooks, but with those of its submodules. The context is therefore set
    at the start of attention and of modules that keep a state; layers with neither get it from ``recomputation``.
    """
    for layer in layers:
        for child in layer.children():
            if "Attention" in type(child).__name__:
                child.register_forward_pre_hook(_enter, with_kwargs=True)
                indexer = getattr(child, "indexer", None)
                if indexer is not None:
                    child.register_forward_pre_hook(_with_mask, with_kwargs=True)
                    watch_indexer(indexer, lambda: _active.call)
    use_states(layers, _enter_states)
    backbone.register_forward_pre_hook(_begin, with_kwargs=True)
    backbone.register_forward_hook(_leave, always_call=True)


def _begin(backbone: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    enter_call(kwargs.get("call"))


def _enter(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if "call" in kwargs:  # not every layer passes it on (Nemotron)
        enter_call(kwargs["call"])


def enter_call(call: Call | None) -> None:
    """Make ``call`` the active call of this thread, until the backbone's forward ends or another call is entered."""
    _active.call, _active.ctx = call, None if call is None else call.ctx


def _enter_states(call: Call | None) -> Call | None:
    """Make the call that a module with a state received the active one. Not every layer passes it on (Jamba)."""
    if call is not None:
        enter_call(call)
    return active_call()


def _with_mask(attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pass a mask placeholder to attention modules with an indexer, which read the mask before calling the attention function."""
    if active_call() is None:
        return args, kwargs
    return args, kwargs | {"attention_mask": window_mask(0)}


def _leave(backbone: nn.Module, args: tuple, output: Any) -> None:
    _active.call = _active.ctx = None
