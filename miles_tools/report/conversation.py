"""The turns of a conversation, as the sample browser shows them: where each answer is, its calls and its reward.

Rollout functions with several turns store them in ``sample.metadata["turns"]``: a list with ``start`` and ``end`` (tokens of the response) for each
answer and, optionally, ``reward``, ``calls`` (``name`` and ``arguments``), ``errors`` (calls that failed) and ``seconds``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

#: Limits of what is shown: turns of a sample, calls of a turn, and characters of a call's arguments.
TURNS, CALLS, CHARACTERS = 200, 20, 300


def turns_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of a sample on disk; [] if it has none. Entries that no rollout function writes are left out."""
    metadata = row.get("metadata")
    turns = metadata.get("turns") if isinstance(metadata, Mapping) else None
    if not isinstance(turns, list):
        return []
    return [made for turn in turns[:TURNS] if isinstance(turn, Mapping) and (made := _turn(turn)) is not None]


def _turn(turn: Mapping[str, Any]) -> dict[str, Any] | None:
    start, end = turn.get("start"), turn.get("end")
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end:
        return None
    made: dict[str, Any] = {"start": start, "end": end}
    for name in ("reward", "errors", "seconds"):
        value = turn.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            made[name] = value
    calls = turn.get("calls")
    if isinstance(calls, list):
        made["calls"] = [_call(call) for call in calls[:CALLS] if isinstance(call, Mapping)]
    return made


def _call(call: Mapping[str, Any]) -> str:
    """Return a call as text: ``name(arguments)``."""
    arguments = call.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    return f"{call.get('name', '?')}({text[:CHARACTERS]}{'...' if len(text) > CHARACTERS else ''})"


def calls_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tool calls of a sample: ``turn``, ``call`` as text, ``failed`` and ``seconds``; [] if it has none."""
    metadata = row.get("metadata")
    calls = metadata.get("tool_calls") if isinstance(metadata, Mapping) else None
    if not isinstance(calls, list):
        return []
    return [
        {
            "turn": call.get("turn"),
            "call": _call(call),
            "failed": bool(call.get("failed")),
            "seconds": call.get("seconds") if isinstance(call.get("seconds"), (int, float)) else None,
        }
        for call in calls[: TURNS * CALLS]
        if isinstance(call, Mapping)
    ]
