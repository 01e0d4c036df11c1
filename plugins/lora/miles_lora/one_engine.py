"""Whether the policies of one base share an embedded engine, and why not. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from miles_core.plugin import STATE_KINDS, Facts, layer_kinds

if TYPE_CHECKING:
    from miles_core.plugin import Policy, Run

#: Reads a fact of one policy.
Value = Callable[[str], Any]
#: Names that linear layers and joined experts have.
_BARE = {"gate_up_proj", "down_proj"}
#: Facts that policies in one batch have in common, and their options.
ALIKE = {
    "model.hf_checkpoint": "--hf-checkpoint",
    "model.ref_load": "--ref-load",
    "rollout.precision": "--rollout-precision",
    "lora.target_modules": "--lora-target-modules",
    "rollout.max_context_len": "--rollout-max-context-len",
    "rollout.max_running_requests": "--max-running-requests",
    "rollout.kv_cache_dtype": "--kv-cache-dtype",
}


def why_separate(value: Value, model: Mapping[str, Any]) -> str:
    """Return why each policy needs an embedded engine of its own; "" if policies over one base share one.

    Args:
        value: facts of a policy.
        model: content of its ``config.json``.
    """
    reasons = (
        (value("lora.sync") != "adapter", "with --lora-sync merged, each engine has other weights"),
        (value("lora.separate_engines"), "--lora-separate-engines"),
        (value("runtime") != "inline", f"--runtime {value('runtime')} starts engines in different processes"),
        (value("colocate"), "with --colocate each engine sleeps and wakes separately"),
        (value("plugin.speculative"), "its drafts are made for one set of weights"),
        (value("plugin.true_on_policy"), "products of several adapters add in another order than those of the trainer"),
        (_names_experts(value), "adapters of joined experts are added to the weights"),
        (bool(STATE_KINDS & {*layer_kinds(model)}), "layers with a state pad the tokens of prompts"),
    )
    return next((reason for holds, reason in reasons if holds), "")


def batch_key(value: Value) -> str:
    """Return what policies in one batch have in common."""
    return "/".join(str(value(name)) for name in ALIKE)


def value_of(run: Run, policy: Policy) -> Value:
    """Return the facts of a policy of a run."""
    config = run.config_of(policy)
    groups = {"model": config.model, "rollout": config.rollout, "lora": config.plugin("lora")}

    def value(name: str) -> Any:
        group, _, option = name.rpartition(".")
        found = getattr(groups.get(group), option, None) if hasattr(groups.get(group), option) else run.plan.fact(name)
        return ",".join(found) if isinstance(found, tuple) else found

    return value


def _names_experts(value: Value) -> bool:
    """Whether the targets of a policy include joined experts, as far as their names show it: of a mixture of experts, a bare name may be
    that of a linear layer and of experts."""
    names = str(value("lora.target_modules")).split(",")
    return any("expert" in name for name in names) or bool(value("model.moe") and _BARE & {*names})


def shares_engine(run: Run, policy: Policy, model: Any) -> bool:
    """Whether a policy shares its embedded engine with others: there are others, and nothing prevents it.

    Args:
        model: an engine's model of the policy.
    """
    from miles_lora.targets import find_targets

    value = value_of(run, policy)
    if value("engine") != "embedded" or why_separate(value, model.config.to_dict()):
        return False
    if run.hooks.find_provided("decoder")[0] != "plain":  # such as a plugin's that the plan does not know
        return False
    if any(target.is_joined for target in find_targets(model, run.config_of(policy).plugin("lora").target_modules)):
        return False
    key = batch_key(value)
    return sum(bool(each.generates) and batch_key(value_of(run, each)) == key for each in run.policies) > 1


def describe(facts: Facts, model: Mapping[str, Any]) -> list[str]:
    """Return the plan's notes about the engines of several policies."""
    names = [name for name in facts.policies if _generates(facts, name)]
    later = ["those that coevolution adds"] if facts.value("plugin.coevolution") else []
    if facts.value("engine") != "embedded" or len(names + later) < 2:
        return []
    if reason := why_separate(facts.value, model):
        return [f"lora: the policies {', '.join(names + later)} decode in an engine each: {reason}"]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(batch_key(facts.scope(name).value), []).append(name)
    largest = max(groups.values(), key=len)
    largest += later
    notes = []
    for group in groups.values():
        if len(group) > 1:
            notes.append(f"lora: one engine decodes the policies {', '.join(group)} in one batch")
        else:
            notes.append(
                f"lora: the policy {group[0]} decodes in an engine of its own: {_differ(facts, group[0], largest[0])}"
            )
    return notes


def _differ(facts: Facts, name: str, other: str) -> str:
    """Say how a policy differs from another, or from the next one if they are the same."""
    other = next(each for each in facts.policies if each != name) if name == other else other
    mine, its = (facts.scope(each).value for each in (name, other))
    flags = [flag for fact, flag in ALIKE.items() if mine(fact) != its(fact)]
    return f"its {' and '.join(flags)} is not that of {other}"


def _generates(facts: Facts, name: str) -> bool:
    """Whether a policy of the configuration has an engine."""
    role, chosen = (facts.value(f"policies.{name}.{option}") for option in ("role", "generates"))
    return role in (None, "train") if chosen is None else bool(chosen)
