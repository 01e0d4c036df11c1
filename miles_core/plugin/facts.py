"""Facts: the named values every rule is about, each with the place it came from.

``gpu.sm = 90 (detected: NVIDIA H200)``, ``model.moe = true (config.json: num_experts=128)``,
``rollout.precision = fp8 (--rollout-fp8)``. A fact is in one of four states; a name that no part of the program defines
is the fourth and always an error with the nearest spelling.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class State(Enum):
    """What is known of a fact on this host."""

    KNOWN = "known"
    UNKNOWN = "unknown on this host"  # the rule is deferred: every worker checks it before it builds anything
    NOT_APPLICABLE = "not applicable"  # the rule is vacuous
    NO_SUCH_NAME = "no such fact"  # an error with the nearest names


@dataclass(frozen=True)
class Fact:
    """One named value.

    Attributes:
        name: dotted name, e.g. ``rollout.precision``.
        value: bool, int, float, str or None; meaningful when ``state`` is KNOWN.
        origin: where the value came from, as shown to the user.
        state: see ``State``.
        flag: the flag that sets it, when a user can.
        choices: the other values it may take, for suggested fixes.
        chosen: a user chose this value (a plugin may not silently change it).
    """

    name: str
    value: Any
    origin: str
    state: State = State.KNOWN
    flag: str = ""
    choices: tuple = ()
    chosen: bool = False
