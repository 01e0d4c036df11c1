"""Stores each row of the recorded fields of a multi-turn conversation once. An engine reports the rows of a field for all tokens of a
request, including those of earlier turns. Without this, the size of the rows would grow with the square of the number of turns.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.rollout.transcript import Turn


def drop_earlier_rows(turn: Turn) -> None:
    """Remove from ``turn.response.extras`` the rows that an earlier turn of the same policy on its path reported.

    Fields with one row per token of the conversation (``token`` and ``token-1``) keep the rows from the last token of that turn on; other fields
    are unchanged. Samples are assembled from all turns of their path, so they are the same. After an update of the weights a turn keeps all rows,
    because fields declared ``newest`` need them.
    """
    before = turn.path[:-1]
    earlier = next((one for one in reversed(before) if one.policy == turn.policy), None)
    if earlier is None or _newer_weights(earlier, turn):
        return
    extras = turn.response.extras
    for name, rows in extras.items():
        if len(rows) >= turn.end - 1 and name in earlier.response.extras:
            extras[name] = copy.copy(rows[earlier.end - 1 :])  # a copy, so that the others are freed


def _newer_weights(earlier: Turn, turn: Turn) -> bool:
    """Whether the weights changed between the last token of ``earlier`` and the last one of ``turn``."""
    before, after = (one.response.weight_versions[-1:] for one in (earlier, turn))
    return [version for _, version in before] != [version for _, version in after]
