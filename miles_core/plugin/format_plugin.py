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
        rollout_alone: the engine may use the format while the trainer computes in BF16.
        rollout_alone_recommends: advice for that case, printed and never enforced.
        experimental: say so when both sides use it.
        both_when: a condition under which both sides use the format, e.g. an option of the plugin that says so.
        both_because: shown when a user's own choice contradicts it.
        more: further entries of ``Plugin``, which are added to those above.

    Raises:
        TypeError: ``more`` holds an entry that ``Plugin`` does not have.
    """
    rules = () if hardware is None else (replace(hardware, hardware=True),)
    pairs = [Pair(name, name, rules=rules, experimental=experimental)]
    if rollout_alone:
        pairs.insert(0, Pair(name, "bf16", rules=rules, recommends=rollout_alone_recommends))
    both = Set(name, when=both_when, because=both_because)
    dashed = name.replace("_", "-")
    return Plugin(
        name=name,
        summary=summary,
        version=version,
        core=core,
        formats={name: format},
        pairs=(*pairs, *more.pop("pairs", ())),
        claims={**CLAIM, **more.pop("claims", {})},
        sets={**({"rollout.precision": both, "train.precision": both} if both_when else {}), **more.pop("sets", {})},
        aliases={
            f"--rollout-{dashed}": {"rollout.precision": name},
            f"--train-{dashed}": {"train.precision": name},
            **more.pop("aliases", {}),
        },
        **more,
    )
