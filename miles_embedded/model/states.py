"""Layers that keep a state between tokens: gated delta nets, Mamba layers, short convolutions.

Attention keeps keys and values, which the call caches. These layers keep tensors of a fixed size per sequence instead: the last inputs of a
convolution, and a recurrent state. Transformers' modules read and write them through methods of its cache. Here ``LayerStates`` has these
methods, for the sequences of one call of one module, and the module's own forward computes the layer. Each kind of call (``Call.advance``)
divides its rows into batches of sequences, provides the states in front of them and stores those after them.

The forward of a module that plugins replaced (its class changed) is not divided into sequences; see ``parts.put_forward``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.model.parts import put_forward
from miles_embedded.model.state_kernels import choose_kernels

#: (kind of state, its index in the layer).
StateKey = tuple[str, int]
#: Attribute with the forward of a module whose step for one token reads and writes ``StoredStates``.
STORING = "miles_storing_forward"
#: Computes a layer for a batch of sequences [sequences, tokens, hidden] with their states; None starts each and keeps no state.
Advance = Callable[[Tensor, "LayerStates | None"], Tensor]

CONVOLUTION, RECURRENT = "convolution", "recurrent"
#: Methods of Transformers' cache that modules with a state call.
_UPDATES = {"update_conv_state", "update_recurrent_state"}


@dataclass(frozen=True)
class StoredStates:
    """Recurrent states of a batch of sequences where they are stored, for a step that reads and writes them there.

    Attributes:
        slab: [states, ...].
        before, after: [sequences] indices of the states in front of the tokens and after them.
    """

    slab: Tensor
    before: Tensor
    after: Tensor


class LayerStates:
    """States of one layer for a batch of sequences, with the methods of Transformers' cache that its module calls.

    Args:
        given: states after the tokens in front of the batch, [sequences, ...] each; empty for sequences that start. A module may modify
            them in place if every sequence has one token. A module with a forward ``STORING`` may receive ``StoredStates``.

    Attributes:
        kept: states after the tokens of the batch of the kinds that the module reads or writes; complete after the forward. A layer may have
            several modules with different kinds.
    """

    def __init__(self, given: dict[StateKey, Any] | None = None) -> None:
        self._given = given or {}
        self.kept: dict[StateKey, Any] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the last inputs of the layer's convolution, [sequences, channels, width]; None if the sequences start."""
        return self._read((CONVOLUTION, state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Append inputs of the convolution [sequences, channels, tokens]; returns all inputs that their outputs depend on."""
        width = conv_kernel_size or conv_states.shape[-1]
        key = CONVOLUTION, state_idx
        if key in self._given:
            inputs = torch.cat([self._given[key], conv_states], -1)
        else:
            inputs = nn.functional.pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        self.kept[key] = inputs[..., -width:]
        return inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the recurrent state [sequences, ...]; None if the sequences start."""
        return self._read((RECURRENT, state_idx))

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0) -> Any:
        """Replace the recurrent state."""
        self.kept[RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def _read(self, key: StateKey) -> Any:
        found = self._given.get(key)
        if found is not None:
            self.kept[key] = found
        return found

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether earlier states are kept: never."""
        return False


def stateful_modules(layer: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a decoder layer that keep a state, found by the methods of the cache that their forward calls."""
    for module in layer.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is not None and _UPDATES & set(code.co_names):
            yield module


def continues_sequences(module: nn.Module) -> bool:
    """Whether a module with a state can compute several tokens after a given recurrent state.

    The scan of Mamba's first version (Jamba) always starts at zero: such a forward reads the state for single tokens only. Forwards that
    can continue pass the state to their scan as ``initial_state`` or ``initial_states``.
    """
    code = inspect.unwrap(type(module).forward).__code__
    constants = {name for entry in code.co_consts for name in (entry if isinstance(entry, tuple) else (entry,))}
    return "update_recurrent_state" not in code.co_names or bool(constants & {"initial_state", "initial_states"})


def use_configured_limit(module: Any) -> None:
    """Limit the time steps of a Mamba layer as its configuration says (``time_step_limit``).

    Transformers' Nemotron-H clamps the time steps of prompts to at least ``time_step_min``, but not those of single tokens, so its generation
    differs from its plain forward (huggingface/transformers#48989). The published model uses the configured limits.
    """
    limit = getattr(getattr(module, "config", None), "time_step_limit", None)
    if limit is not None and hasattr(module, "time_step_limit"):
        module.time_step_limit = tuple(limit)


def use_states(layers: nn.ModuleList, enter: Callable[[Any], Any]) -> None:
    """Make the modules of ``layers`` that keep a state compute the sequences of a call.

    Args:
        layers: decoder layers.
        enter: called with the call that the layer received, or None; returns the call that is active.
    """

    def forward(module: Any, hidden_states: Tensor, *args: Any, call: Any = None, **kwargs: Any) -> Tensor:
        own, call = module.__dict__.get(STORING, type(module).forward), enter(call)
        if call is None:
            return own(module, hidden_states, *args, **kwargs)
        out: Tensor = call.advance(module, hidden_states, lambda x, states: own(module, x, cache=states))
        return out

    found = [module for layer in layers for module in stateful_modules(layer)]
    choose_kernels(found)
    for module in found:
        use_configured_limit(module)
        put_forward(module, forward)
