"""Checks of a plan that need more than one policy's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """See ``miles_core.plugin.Plugin.review``: policies that are not trained through adapters have no options of adapters."""
    problems, notes = [], []
    for name in facts.policies:
        role = facts.value(f"policies.{name}.role") if len(facts.policies) > 1 else "train"
        own = [facts.lookup(fact) for fact in facts if fact.startswith(f"policies.{name}.lora.")]
        if role != "train" and own:
            why = (
                "a critic is trained in full, because its value head needs a trunk of its own"
                if role == "critic"
                else "a frozen policy computes with the base alone"
            )
            problems.append(
                Problem(
                    "lora", f"no adapter options for the policy {name}", why, tuple(describe_fact(fact) for fact in own)
                )
            )
        elif role == "critic":
            notes.append(f"lora: the policy {name} (critic) is trained in full, without adapters")
    return Review(notes=tuple(notes), problems=tuple(problems))
