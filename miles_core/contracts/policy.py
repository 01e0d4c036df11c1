"""A policy: one model being trained.

A run has one policy by default; co-evolution has several. What is true once a policy (its checkpoint, the version that
was synced, its namespace in a checkpoint) is here; its engine and its learner are ``PolicyParts``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from miles_core.errors import PluginError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")


@dataclass(eq=False)
class Policy:
    """One model being trained, and how far it is.

    Attributes:
        hf_checkpoint: the checkpoint directory it starts from.
        name: names its checkpoint folder and prefixes its metrics when there are several.
        version: the last weight version synced; -1 before the first.
        trained: optimiser steps done, those of a warm start not counted.
    """

    hf_checkpoint: str = ""
    name: str = "policy"
    version: int = -1
    trained: int = 0


def check_policies(policies: Sequence[object]) -> None:
    """What ``on_start`` may have made of a run's policies is at least one, each under a name of its own that can name a folder.

    Raises:
        PluginError: it is not.
    """
    known: list[str] = []
    for policy in policies:
        if not isinstance(policy, Policy):
            raise PluginError(f"run.policies holds {policy!r:.80} after on_start; it is a list of miles_core.Policy")
        name: object = policy.name
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "state":
            raise PluginError(
                f"a policy has the name {name!r:.80}: it names a folder of every checkpoint, beside 'state'; use letters, digits, _ and -"
            )
        if name in known:
            raise PluginError(f"two policies have the name {name!r}; give Policy(name=...) another")
        known.append(name)
    if not known:
        raise PluginError("run.policies is empty after on_start; a run trains at least one policy")
