"""The manifest of this package, which provides the encoder of weights, and a function that creates the manifest of a number format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from miles_core.plugin.manifest import Pair, Plugin, Rule, Set
from miles_core.version import __version__

plugin = Plugin(
    name="formats",
    summary="encodes weights in number formats, shipped with miles-core",
    version=__version__,
    core=f"=={__version__}",
    standard=True,
    provides={"codec": {"format": "miles_formats.options:codec_for"}},
)

#: The exclusive slot of number formats, and the reason for it.
CLAIM = {"precision": "a run has one low-precision format"}


def format_plugin(
    name: str,
    summary: str,
    *,
    format: str,
    version: str,
    core: str,
    hardware: Rule | None = None,
    model: Rule | None = None,
    rollout_alone: bool = True,
    rollout_alone_recommends: tuple[Rule, ...] = (),
    experimental: bool = False,
    both_when: str = "",
    both_because: str = "",
    **more: Any,
) -> Plugin:
    """Create the manifest of a plugin that provides one number format for weights.

    The plugin claims the slot ``precision``, supports the format on both sides (and, with ``rollout_alone``, in the engine alone),
    and has the flags ``--rollout-NAME`` and ``--train-NAME``.

    Args:
        name: name of the plugin and of the format, as in ``--rollout-precision``.
        summary, version, core: as in ``Plugin``.
        format: ``"module:Class"``, a ``miles_formats.Format``.
        hardware: requirement of its tensor cores, e.g. ``Rule("gpu.sm >= 90", "its products need ...")``; ``--emulate-precision`` waives it.
        model: requirement of the model of each policy in this format, e.g. ``Rule("model.moe", "it quantises experts only")``.
        rollout_alone: whether the engine may use the format while the trainer computes in BF16.
        rollout_alone_recommends: recommendations for that case.
        experimental: whether plans mark the format as experimental when both sides use it.
        both_when, both_because: condition under which the plugin sets the format on both sides, and the reason shown otherwise.
        more: further fields of ``Plugin``, such as ``format_error``, merged with those above. Unknown fields raise TypeError.
    """
    rules = (*([] if hardware is None else [replace(hardware, hardware=True)]), *([] if model is None else [model]))
    alone = (Pair(name, "bf16", rules=rules, recommends=rollout_alone_recommends),) if rollout_alone else ()
    pairs = (*alone, Pair(name, name, rules=rules, experimental=experimental), *more.pop("pairs", ()))
    both, sides = Set(name, when=both_when, because=both_because), ("rollout", "train")
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
