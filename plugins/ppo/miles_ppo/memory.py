"""Memory of a separate critic, which is a second trainer, for the plan. Does not import torch.

In one process it adds to the policy's trainer and to the engine; a runtime with several processes gives each policy and each critic GPUs of
their own, or those of the policy (``--share-policy-gpus``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from miles_core.plugin import Facts, Parts, Usage
from miles_embedded import size_of, trainer_parts, training_of


def usage(facts: Facts, model: Mapping[str, Any]) -> Iterator[Usage]:
    """See ``miles_core.plugin.Plugin.memory``: the critic that the plugin adds; Megatron-Core's is as large as the policy's trainer, which
    is counted there."""
    own = facts.value("ppo.trunk") == "own" and facts.value("trainer") == "embedded"
    if not own or facts.value("model.device") == "cpu":
        return
    size = size_of(facts, _read_config(facts.value("ppo.checkpoint")) or model)
    if size is None:
        return
    how = replace(training_of(facts), reference=False)
    parts = trainer_parts(size, how)
    if facts.value("runtime") == "inline":  # one context, and activations of one trainer at a time
        parts = replace(parts, other=0.0, activations=0.0)
    label = "critic"
    if facts.value("ray.share_policy_gpus"):
        policy = size_of(facts, model)
        if policy is not None:
            parts, label = _add(parts, trainer_parts(policy, training_of(facts))), "critic and policy on one GPU"
    note = f"critic: {size.parameters / 1e9:,.3g} billion parameters, trained in full"
    yield Usage("trainer", label, parts, parts.other, note=note, processes=how.ranks)


def _add(one: Parts, two: Parts) -> Parts:
    """Return the memory of two processes on one GPU."""
    return Parts(**{field.name: getattr(one, field.name) + getattr(two, field.name) for field in fields(Parts)})


def _read_config(checkpoint: str | None) -> dict[str, Any] | None:
    """Read the ``config.json`` of ``--critic-load``; None for the policy's model, and where there is none to read yet (a name on the hub)."""
    file = None if checkpoint is None else Path(checkpoint).expanduser() / "config.json"
    try:
        found = None if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # reported where the checkpoint is loaded
    return found if isinstance(found, dict) else None
