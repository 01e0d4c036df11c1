"""The manifest of a number format: what all of them say alike, written once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from miles_core.plugin.manifest import Pair, Plugin, Rule, Set

#: The exclusive slot of number formats, and why it is one.
CLAIM = {"precision": "a run has one low-precision format"}


def format_plugin(
    name: str,
    summary: str,
    *,
    format: str,
    version: str,
    core: str,
    hardware: Rule | None = None,
    rollout_alone: bool = True,
    rollout_alone_recommends: tuple[Rule, ...] = (),
    experimental: bool = False,
    both_when: str = "",
    both_because: str = "",
    **more: Any,
) -> Plugin:
    """The manifest of a plugin that is one number format for weights.

    It claims the slot ``precision``, supports the format on both sides (and in the engine alone), and has the flags
    ``--rollout-NAME`` and ``--train-NAME``.

    Args:
        name: of the plugin and of the format, as in ``--rollout-precision``.
        summary, version, core: as in ``Plugin``.
        format: ``"module:Class"``, a ``miles_core.format.Format``.
        hardware: what the format's tensor cores need, e.g. ``Rule("gpu.sm >= 90", "its products need ...")``;
            ``--emulate-precision`` waives it. None where it computes on any device.
        rollout_alone, rollout_alone_recommends: the engine may use it while the trainer computes in BF16; advice on that.
        experimental: say so when both sides use it.
        both_when, both_because: a condition under which both sides use the format (an option of the plugin that says so),
            and what is shown when a user's own choice contradicts it.
        more: further entries of ``Plugin``, added to those above; TypeError for one that it does not have.
    """
    rules = () if hardware is None else (replace(hardware, hardware=True),)
    alone = (Pair(name, "bf16", rules=rules, recommends=rollout_alone_recommends),) if rollout_alone else ()
    pairs = (*alone, Pair(name, name, rules=rules, experimental=experimental), *more.pop("pairs", ()))
    both = Set(name, when=both_when, because=both_because)
    sides = ("rollout", "train")
    return Plugin(
        name=name,
        summary=summary,
        version=version,
        core=core,
        formats={name: format},
        pairs=pairs,
        claims=CLAIM | more.pop("claims", {}),
        sets={f"{side}.precision": both for side in sides if both_when} | more.pop("sets", {}),
        aliases={f"--{side}-{name.replace('_', '-')}": {f"{side}.precision": name} for side in sides}
        | more.pop("aliases", {}),
        **more,
    )
