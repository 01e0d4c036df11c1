"""A policy: one model of a run, and what becomes of it.

A run has one policy by default; self-play, critics and distillation have several. What is true of a policy everywhere (its
checkpoint, its role, the version that its engine serves) is here; its engine and its learner are ``PolicyParts``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from miles_core.errors import PluginError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")

#: ``train``: generates samples and learns from them. ``critic``: has a value head instead of an output layer, and learns when a
#: ``wrap_learn`` asks it to. ``frozen``: never learns; it scores samples (a teacher, a reference) and may generate (an opponent).
Role = Literal["train", "critic", "frozen"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(eq=False)
class Policy:
    """One model of a run.

    Attributes:
        hf_checkpoint: the checkpoint directory it starts from; "" is the run's ``--hf-checkpoint``.
        name: names its checkpoint folder and prefixes its metrics when there are several.
        role: see ``Role``.
        generates: it has an engine, which requests may name; by default policies of the role ``train`` do.
        options: option -> value, where they differ from the run's; keys as in a configuration file (``lr`` or ``train.lr``).
            ``Run.config_of`` applies them.
        version: the last weight version that its engine received; -1 before the first.
        trained: optimizer steps done, without those of a warm start.
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
        """Whether it has an optimizer."""
        return self.role != "frozen"


def check_policies(policies: Sequence[object]) -> None:
    """A run needs at least one policy that trains, each under a name of its own that can name a folder.

    Raises:
        PluginError: what ``on_start`` made of ``run.policies`` is something else.
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
                f"a policy has the name {name!r:.80}: it names a folder of every checkpoint, beside 'state'; use letters, digits, _ and -"
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
