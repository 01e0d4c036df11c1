"""Checks of a plan that need more than one policy's facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact
from miles_embedded import size_of
from miles_lora.memory import base_bytes, is_encoded, shares_base
from miles_lora.one_engine import describe


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
    notes += describe(facts, model or {})
    problems += [*_too_few_gpus(facts), *_too_large(facts, model or {})]
    if shares_base(facts):
        how = str(facts.value("train.precision"))
        codes = "its weights" if how == "bf16" else f"its {how} codes"
        gpus = int(facts.value("lora.base_gpus") or 1)
        where = f", with experts on {gpus} GPUs" if gpus > 1 else ""
        notes.append(
            f"lora: one copy of the frozen base is held{where}: engine and trainer compute with {codes} in the same memory"
        )
    elif is_encoded(facts) and facts.value("engine") == "embedded":
        notes.append(
            "lora: every trainer rank and every engine holds the whole base: this backend does not divide experts among processes, and "
            "processes share no weights; one process (the default runtime, without --colocate) holds one copy"
        )
    return Review(notes=tuple(notes), problems=tuple(problems))


def _too_few_gpus(facts: Facts) -> list[Problem]:
    """Refuse ``--lora-base-gpus`` beyond the GPUs of a machine."""
    wanted, count = facts.lookup("lora.base_gpus"), facts.lookup("gpu.count")
    if facts.value("model.device") == "cpu" or not count.value or int(wanted.value or 1) <= int(count.value):
        return []
    why = "one process drives these GPUs, so they are in one machine"
    return [Problem("lora", f"{wanted.value} GPUs", why, (describe_fact(wanted), describe_fact(count)))]


def _too_large(facts: Facts, model: Mapping[str, Any]) -> list[Problem]:
    """Refuse an encoded base of which a GPU cannot hold its part."""
    size, memory = size_of(facts, model), facts.lookup("gpu.memory_gb")
    if size is None or not memory.value or facts.value("model.device") == "cpu" or not is_encoded(facts):
        return []
    held, gpus = base_bytes(facts, size) / 1e9, facts.lookup("lora.base_gpus")
    if held <= float(memory.value):
        return []
    here = facts.value("runtime") == "inline" and facts.value("train.precision") == "int4" and size.experts
    most, now = int(facts.value("gpu.count") or 1), int(gpus.value or 1)
    more = [1 << n for n in range(1, 7) if now < 1 << n <= most] if here else []
    return [
        Problem(
            "lora",
            f"a GPU with more than {held:,.0f} GB for its part of the base",
            "trainer ranks and engines of the embedded backend do not divide a base in a number format; one process can hold the experts of "
            "an INT4 base on the GPUs of its machine (--lora-base-gpus)",
            tuple(describe_fact(fact) for fact in (memory, facts.lookup("train.precision"), gpus)),
            tries=lambda: ({"lora.base_gpus": count} for count in more),
        )
    ]
