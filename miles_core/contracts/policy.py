"""A policy: one model of a run.

A run has one policy by default; self-play, critics and teachers use several. ``Policy`` holds the data that every process
needs (checkpoint, role, version served by the engine); ``PolicyParts`` holds the engine and the learner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from miles_core.errors import PluginError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

#: ``train``: generates samples and learns from them. ``critic``: has a value head instead of an output layer, and learns when a
#: ``wrap_learn`` hook calls its learner. ``frozen``: never learns; scores samples (teacher, reference) and may generate (opponent).
Role = Literal["train", "critic", "frozen"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(eq=False)
class Policy:
    """One model of a run.

    Attributes:
        hf_checkpoint: directory of the initial checkpoint; "" is the run's ``--hf-checkpoint``.
        name: name of the policy's checkpoint folder, and the prefix of its metrics if several policies train.
        role: see ``Role``.
        generates: whether the policy has an engine; by default policies of the role ``train`` do.
        options: option -> value, for options that differ from the run's; keys as in a configuration file (``lr`` or
            ``train.lr``). ``Run.config_of`` applies them.
        version: the last weight version that the policy's engine received; -1 before the first.
        trained: number of optimiser steps, without those of a warm start.
    """

    hf_checkpoint: str = ""
    name: str = "policy"
    role: Role = "train"
    generates: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    version: int = -1
    trained: int = 0

    def __post_init__(self) -> None:
        if self.generates is None:
            self.generates = self.role == "train"

    @property
    def learns(self) -> bool:
        """Whether the policy has an optimiser."""
        return self.role != "frozen"


def check_policies(policies: Sequence[object]) -> None:
    """Check ``run.policies`` after ``on_start``: at least one policy trains, and the names are unique and valid folder names.

    Raises:
        PluginError: a policy is invalid, or no policy trains.
    """
    known: dict[str, Policy] = {}
    for policy in policies:
        if not isinstance(policy, Policy):
            raise PluginError(
                f"run.policies holds {policy!r:.80} after on_start; it is a list of miles_core.plugin.Policy"
            )
        name: object = policy.name
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "state":
            raise PluginError(
                f"a policy has the name {name!r:.80}: it names a folder of every checkpoint, next to 'state'; use letters, digits, _ and -"
            )
        if name in known:
            raise PluginError(f"two policies have the name {name!r}; give Policy(name=...) another")
        if policy.role not in ROLES:
            raise PluginError(
                f"the policy {name} has the role {policy.role!r:.80}; a role is one of {', '.join(ROLES)}"
            )
        if policy.role == "critic" and policy.generates:
            raise PluginError(
                f"the policy {name} is a critic, whose model predicts values and no tokens; leave generates=True out"
            )
        known[name] = policy
    if not known:
        raise PluginError("run.policies is empty after on_start; a run trains at least one policy")
    if not any(policy.role == "train" for policy in known.values()):
        raise PluginError(
            f"no policy has the role train ({', '.join(known)}); a run trains at least one policy that generates"
        )
    for policy in known.values():
        if policy.role == "train" and not policy.generates:
            raise PluginError(
                f"the policy {policy.name} has the role train and generates=False; it learns from samples of its own, so give it "
                "an engine, or the role critic or frozen"
            )
