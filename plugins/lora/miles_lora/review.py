"""Checks of a plan that need more than one policy's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact
from miles_embedded import size_of
from miles_lora.memory import base_bytes, is_encoded, shares_base


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
    problems += _too_large(facts, model or {})
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


def _too_large(facts: Facts, model: Mapping[str, Any]) -> list[Problem]:
    """Refuse an encoded base that is larger than a GPU, because no option divides it."""
    size, memory = size_of(facts, model), facts.lookup("gpu.memory_gb")
    if size is None or not memory.value or facts.value("model.device") == "cpu" or not is_encoded(facts):
        return []
    held = base_bytes(facts, size) / 1e9
    if held <= float(memory.value):
        return []
    return [
        Problem(
            "lora",
            f"a GPU with more than {held:,.0f} GB for the codes of the base",
            "the embedded trainer and engine hold the whole base on each GPU: they do not divide experts among GPUs, so more GPUs do not help; "
            "use a smaller model, or --engine sglang --trainer megatron, which divide weights and need a base in BF16",
            (describe_fact(memory), describe_fact(facts.lookup("train.precision"))),
            "needs",
        )
    ]
