"""Learned and sinusoidal position embeddings: tables with one row per position.

Some decoder stacks ignore the positions that they receive. Those of BART's kind count the rows of a call; those of RoBERTa's kind take
positions that start behind the padding id. A call here contains several sequences, or the next tokens of many, so each table receives the
positions of the call.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from miles_embedded.model.call import active_call
from miles_embedded.model.parts import backbone

#: Method of embeddings that number positions from the padding id.
_FROM_PADDING = "create_position_ids_from_input_ids"
_POSITIONS = "position_ids"
#: Names of position tables in decoder stacks.
_TABLES = ("wpe", "embed_positions", "position_embeddings", "pos_encoding")


def follow_positions(model: nn.Module) -> None:
    """Make position tables that count the rows of a call use the positions of the ``Call``; other modules stay unchanged."""
    stack: Any = backbone(model)
    counts_rows = _POSITIONS not in inspect.signature(stack.forward).parameters
    for module in stack.modules():
        if hasattr(module, _FROM_PADDING):
            module.register_forward_pre_hook(_start_after_padding, with_kwargs=True)
        elif counts_rows and isinstance(module, nn.Embedding) and _POSITIONS in _parameters(module):
            module.register_forward_pre_hook(_use_call, with_kwargs=True)


def positions_from_padding(model: nn.Module) -> bool:
    """Whether the model numbers positions from its padding id, and counts no padding inside a sequence."""
    return any(hasattr(module, _FROM_PADDING) for module in model.modules())


def table_length(model: nn.Module) -> int | None:
    """Return the longest sequence for which the model's position tables have rows; None without a table."""
    lengths = [
        len(table.weight if isinstance(table, nn.Embedding) else table) - _first_row(module, table)
        for module in backbone(model).modules()
        for name in _TABLES
        if isinstance(table := getattr(module, name, None), (nn.Embedding, Tensor))
    ]
    return min(lengths, default=None)


def _first_row(module: Any, table: Any) -> int:
    return int(module.padding_idx + 1 if hasattr(module, _FROM_PADDING) else getattr(table, "offset", 0))


def _parameters(module: nn.Module) -> set[str]:
    return set(inspect.signature(type(module).forward).parameters)


def _start_after_padding(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    given: Tensor | None = kwargs.get(_POSITIONS)
    if given is None or active_call() is None:
        return args, kwargs
    return args, kwargs | {_POSITIONS: given + module.padding_idx + 1}


def _use_call(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    call, counted = active_call(), kwargs.get(_POSITIONS)
    if call is None or counted is None:
        return args, kwargs
    return args, kwargs | {_POSITIONS: call.positions.view_as(counted)}
