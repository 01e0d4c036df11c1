"""Checks of a plan that need more than one policy's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact
from miles_lora.memory import is_encoded, shares_base


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
    if shares_base(facts):
        how = str(facts.value("train.precision"))
        codes = "its weights" if how == "bf16" else f"its {how} codes"
        notes.append(
            f"lora: one copy of the frozen base is held: engine and trainer compute with {codes} in the same memory"
        )
    elif is_encoded(facts) and facts.value("engine") == "embedded":
        notes.append(
            "lora: every trainer rank and every engine holds the whole base: this backend does not divide experts among processes, and "
            "processes share no weights; one process (the default runtime, without --colocate) holds one copy"
        )
    return Review(notes=tuple(notes), problems=tuple(problems))
