"""Rules between core's options.

``RULES`` use the grammar of plugins' rules. ``RELATIONS`` compare two options, which that grammar does not support. Both are
checked when a configuration is loaded. The conditions under which a single option has an effect are declared with the option
(``only_if``) and checked in ``effects``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from miles_core.plugin.facts import Fact, Facts, show
from miles_core.plugin.manifest import Rule
from miles_core.plugin.rule import Truth, evaluate, names, parse

_NO_DISCOUNT = "{grpo, dr_grpo, rloo, gspo, cispo}"

RULES: tuple[Rule, ...] = (
    Rule(
        "train.use_dynamic_batch_size or not train.micro_batch_size",
        "with --micro-batch-size micro-batches are filled by samples, and by tokens only with --use-dynamic-batch-size",
        when="train.max_tokens_per_gpu",
    ),
    Rule(
        "train.num_steps_per_rollout == none",
        "both say how a rollout step is split into optimiser steps",
        when="train.global_batch_size",
    ),
    Rule(
        "algorithm.advantage_estimator != cispo",
        "its loss clips the ratio only from above, and has no bound for negative advantages",
        when="algorithm.eps_clip_c",
    ),
    Rule(
        f"algorithm.advantage_estimator not in {_NO_DISCOUNT}",
        "a KL in the reward needs an estimator with a reward per token, such as reinforce_plus_plus; "
        "--kl-loss-coef works with all",
        when="algorithm.kl_coef",
    ),
    Rule(
        f"algorithm.advantage_estimator not in {_NO_DISCOUNT}",
        "a discount needs an estimator with a return per token, such as reinforce_plus_plus",
        when="algorithm.gamma < 1",
    ),
    Rule(
        "rollout.n_samples_per_prompt >= 2",
        "its advantages compare the samples of one prompt, and with a single sample they are all 0",
        when="algorithm.advantage_estimator in {grpo, dr_grpo, rloo, gspo, cispo, reinforce_plus_plus_baseline} "
        "and rollout.custom_generate_function_path == none and rollout.generate == turn and rollout.generate_key == none",
    ),
    Rule("reward.rm_url", "a remote reward needs its address", when="reward.rm_type == remote"),
    Rule(
        "data.label_key",
        "the reward compares a response with the label of its prompt; name its column",
        when="reward.rm_type in {exact, boxed, f1, math} and data.prompts == file and rollout.generate == turn "
        "and rollout.custom_generate_function_path == none",
    ),
    Rule("reward.custom_rm_path == none", "a sample has one reward function", when="reward.rm_type"),
    Rule("rollout.generate == turn", "a sample has one rollout function", when="rollout.custom_generate_function_path"),
    Rule(
        "not precision.emulated",
        "a native product needs the tensor cores that a run with --emulate-precision does without",
        when="precision.quantized_product == native",
    ),
    Rule(
        "rollout.max_weight_staleness != 0",
        "a sample that is generated during the training of a step is one version old when it is trained on; "
        "--schedule sync never trains on older samples",
        when="schedule == async",
    ),
    Rule(
        "rollout.over_sampling_batch_size == none",
        "generation is continuous, and --max-weight-staleness bounds the number of requested prompts",
        when="schedule == async",
    ),
    Rule(
        "schedule == async or rollout.over_sampling_batch_size",
        "a collection that requests no more prompts than it needs leaves no response unfinished",
        when="rollout.partial_rollout and schedule in {sync, ahead}",
    ),
    Rule(
        "rollout.partial_rollout or schedule == async",
        "only then is a response in flight while weights change",
        when="rollout.pause_generation_mode != abort or rollout.mask_offpolicy_in_partial_rollout",
    ),
    Rule(
        "rollout.partial_rollout != false",
        "without it every response is finished before weights change",
        when="schedule == async and (rollout.pause_generation_mode != abort or rollout.mask_offpolicy_in_partial_rollout "
        "or rollout.stale_samples != drop)",
    ),
    Rule("schedule == sync", "the engine cannot generate while the trainer uses the same GPUs", when="colocate"),
    Rule(
        "rollout.pause_generation_mode != in_place",
        "the cache that it keeps would occupy memory that the trainer needs",
        when="colocate",
    ),
)

#: (option, comparison, option, reason). Not checked if either option has no value.
RELATIONS: tuple[tuple[str, str, str, str], ...] = (
    (
        "rollout.over_sampling_batch_size",
        ">=",
        "rollout.batch_size",
        "a collection requests at least the prompts of a step",
    ),
    ("rollout.workers", "<=", "rollout.batch_size", "a worker produces whole groups, and more would be idle"),
    ("rollout.workers", "<=", "rollout.max_concurrent_samples", "the workers share them"),
    ("rollout.workers", "<=", "reward.concurrency", "the workers share these calls"),
    ("rollout.max_prompt_len", "<", "rollout.max_context_len", "a response must fit after the prompt"),
    ("reward.overlong_buffer_len", "<=", "rollout.max_response_len", "the buffer is the end of the response"),
    ("train.min_lr", "<=", "train.lr", "the learning rate decays towards it"),
    ("train.lr_warmup_iters", "<", "train.lr_decay_iters", "the decay begins after the warm-up"),
)

#: A rollout function of the user or of a plugin.
_OWN_FUNCTION = "rollout.custom_generate_function_path or rollout.generate != turn or rollout.generate_key"
#: The options from which ``count_steps`` computes.
_LENGTH = (
    *("rollout.num_rollout", "rollout.batch_size", "rollout.n_samples_per_prompt"),
    *("train.global_batch_size", "train.num_steps_per_rollout"),
)


#: Condition -> note of the plan about options that have no effect in combination.
REMARKS = {
    "verify_logprobs_tolerance != 0.1 and not verify_logprobs": "--verify-logprobs-tolerance has no effect in training without --verify-logprobs",
    "train.use_dynamic_batch_size and train.micro_batch_size": "--micro-batch-size has no effect with --use-dynamic-batch-size, which "
    "fills micro-batches by tokens",
    "precision.emulated and rollout.precision == bf16 and train.precision == bf16": "--emulate-precision has no effect without a number "
    "format (--rollout-precision, --train-precision)",
}


def find_rule_violations(known: Facts, inherited: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    """Yield an error message for every rule and relation that the options among these facts violate.

    Args:
        inherited: option path -> default, for options whose value comes from the run that ``--load`` continues.
    """
    for rule in RULES:
        if evaluate(rule.when, known.lookup) is Truth.TRUE and evaluate(rule.needs, known.lookup) is Truth.FALSE:
            causes = [known[name] for name in names(parse(rule.when))]
            where = " and ".join(fact.origin for fact in causes if fact.chosen) or _format_values(causes)
            actual = _format_values([known[name] for name in names(parse(rule.needs))])
            yield f"{where}: it needs {rule.needs}, and {actual}: {rule.because}{_suggest_default(rule, known, inherited)}"
    if uneven := _explain_uneven_steps(known):
        yield uneven
    for left, sign, right, because in RELATIONS:
        one, two = known[left], known[right]
        if one.value is None or two.value is None:
            continue
        if not {"<": one.value < two.value, "<=": one.value <= two.value, ">=": one.value >= two.value}[sign]:
            yield f"{left} must be {sign} {right}, and {_format_values([one, two])}: {because}"


def _suggest_default(rule: Rule, known: Facts, inherited: Mapping[str, Any]) -> str:
    """Return advice to reset an option of the continued run with which the violated ``rule`` would hold; empty if there is none."""
    for name in dict.fromkeys([*names(parse(rule.when)), *names(parse(rule.needs))]):
        if name not in inherited or isinstance(inherited[name], bool):
            continue
        changed = {name: replace(known[name], value=inherited[name])}

        def lookup(each: str, changed: Mapping[str, Fact] = changed) -> Fact:
            return changed.get(each) or known.lookup(each)

        if evaluate(rule.when, lookup) is Truth.FALSE or evaluate(rule.needs, lookup) is Truth.TRUE:
            flag = known[name].flag
            return f"; --load continues a run with {flag} {show(known[name].value)}: {flag} {show(inherited[name]) or 'none'} resets it"
    return ""


def find_remarks(facts: Facts) -> Iterator[str]:
    """Yield a note for the plan for each option of one policy (``Facts.scope``) that has no effect within the length of the run."""
    yield from (line for condition, line in REMARKS.items() if evaluate(condition, facts.lookup) is Truth.TRUE)
    rollouts = int(facts.value("rollout.num_rollout") or 0)
    steps = count_steps(facts.value)
    if not steps:
        return
    warm_up, precision = facts["train.lr_warmup_iters"], facts["precision.warmup_steps"]
    if warm_up.value > steps:
        yield (
            f"{warm_up.origin}: the warm-up is longer than the run, which has {steps} optimiser steps, so the learning rate only reaches "
            f"{steps / warm_up.value:.0%} of --lr"
        )
    if precision.value >= steps:
        yield f"{precision.origin}: the warm-up is as long as the run, which has {steps} optimiser steps, so nothing is quantised"
    interval = facts["save_interval"]
    if interval.chosen and interval.value is not None and interval.value > rollouts:
        yield f"no effect: {interval.origin}: the run has {rollouts} rollouts, so the only checkpoint is the one at its end"


def count_steps(value: Callable[[str], Any]) -> int:
    """Return the number of optimiser steps of a run, from a function that returns the value of an option."""
    samples = int(value("rollout.batch_size")) * int(value("rollout.n_samples_per_prompt"))
    size, count = value("train.global_batch_size"), value("train.num_steps_per_rollout")
    return int(value("rollout.num_rollout")) * (max(1, round(samples / int(size))) if size else int(count or 1))


def explain_stretched_decay(value: Callable[[str], Any], before: Mapping[str, Any]) -> str:
    """Return why the learning rate of a continued run would jump: it decays until the end of the run, and the end has moved.

    Args:
        value: returns the value of an option.
        before: option path -> value in the run that is continued.
    """
    decays = before.get("train.lr_schedule", "constant") != "constant" and value("train.lr_schedule") != "constant"
    until = value("train.lr_decay_iters") or before.get("train.lr_decay_iters")
    if not decays or until or any(path not in before for path in _LENGTH):
        return ""
    now, then = count_steps(value), count_steps(before.get)
    if now == then:
        return ""
    return (
        f"--load: the learning rate decays until the end of the run, which has {now} optimiser steps instead of the {then} of the run "
        f"that is continued, so it would jump; --lr-decay-iters {then} keeps the decay of that run, and --lr-decay-iters {now} stretches it"
    )


def _explain_uneven_steps(known: Facts) -> str:
    """Return why ``--global-batch-size`` or ``--num-steps-per-rollout`` cannot have the effect that it names."""
    samples = known["rollout.batch_size"].value * known["rollout.n_samples_per_prompt"].value
    size, count = known["train.global_batch_size"], known["train.num_steps_per_rollout"]
    if evaluate(_OWN_FUNCTION, known.lookup) is Truth.TRUE:  # which may return any number of samples
        return ""
    if size.value and samples % size.value:
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        near = [
            max((n for n in divisors if n < size.value), default=1),
            min((n for n in divisors if n > size.value), default=samples),
        ]
        return (
            f"{size.origin}: a rollout step has {samples} samples (--rollout-batch-size x --n-samples-per-prompt), which do not divide "
            f"into optimiser steps of {size.value}; give {' or '.join(map(str, dict.fromkeys(near)))}"
        )
    if count.value and count.value > samples:
        return f"{count.origin}: a rollout step has {samples} samples, which cannot be divided into more optimiser steps; give at most {samples}"
    return ""


def _format_values(facts: Iterable[Fact]) -> str:
    return " and ".join(f"{fact.flag} is {show(fact.value) or 'none'} ({fact.origin})" for fact in facts)
