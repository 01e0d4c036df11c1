"""Rules between core's options.

An option that would have no effect is rejected instead of ignored. ``RULES`` use the grammar of plugins' rules. ``RELATIONS``
compare two options, which that grammar does not support. Both are checked when a configuration is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from miles_core.plugin.facts import Fact, Facts, show
from miles_core.plugin.manifest import Rule
from miles_core.plugin.rule import Truth, evaluate, names, parse

_QUANTISED = "rollout.precision != bf16 or train.precision != bf16"
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
        "train.lr_schedule != constant",
        "a constant learning rate does not decay",
        when="train.lr_decay_iters or train.min_lr",
    ),
    Rule(
        "algorithm.loss_aggregation == constant",
        "only that aggregation divides by a constant length",
        when="algorithm.loss_constant_length",
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
    Rule("reward.rm_type == remote", "only a remote reward uses an address", when="reward.rm_url"),
    Rule("reward.custom_rm_path == none", "a sample has one reward function", when="reward.rm_type"),
    Rule("rollout.generate == turn", "a sample has one rollout function", when="rollout.custom_generate_function_path"),
    Rule("evaluation.prompt_data", "these are the sources of its data sets", when="evaluation.prompts"),
    Rule("evaluation.prompt_data", "there is nothing to evaluate on", when="evaluation.interval"),
    Rule("evaluation.interval", "nothing says when to evaluate", when="evaluation.prompt_data"),
    Rule(
        _QUANTISED,
        "without a number format nothing is quantised anyway",
        when="precision.num_layers_at_start_in_bf16 or precision.num_layers_at_end_in_bf16 "
        "or precision.extra_high_precision_layers",
    ),
    Rule(_QUANTISED, "a warm-up ends with quantisation switched on", when="precision.warmup_steps"),
    Rule(
        _QUANTISED, "without a number format there is no product of codes", when="precision.quantized_product != auto"
    ),
    Rule(
        "not precision.emulated",
        "a native product needs the tensor cores that a run with --emulate-precision does without",
        when="precision.quantized_product == native",
    ),
    Rule(
        "schedule == async",
        "with sync every sample is generated with the weights it trains, and with ahead it is one version older",
        when="rollout.max_weight_staleness != none",
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
        "schedule == async",
        "only a response that continues with new weights becomes older than --max-weight-staleness allows",
        when="rollout.stale_samples != drop",
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
    Rule("profile", "without --profile no trace is recorded", when="profile_dir"),
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
)


def find_rule_violations(facts: Iterable[Fact]) -> Iterator[str]:
    """Yield an error message for every rule and relation that these options (``Config.facts``) violate."""
    known = Facts(facts)
    for rule in RULES:
        if evaluate(rule.when, known.lookup) is Truth.TRUE and evaluate(rule.needs, known.lookup) is Truth.FALSE:
            causes = [known[name] for name in names(parse(rule.when))]
            where = " and ".join(fact.origin for fact in causes if fact.chosen) or _format_values(causes)
            actual = _format_values([known[name] for name in names(parse(rule.needs))])
            yield f"{where}: it needs {rule.needs}, and {actual}: {rule.because}"
    for left, sign, right, because in RELATIONS:
        one, two = known[left], known[right]
        if one.value is None or two.value is None:
            continue
        if not {"<": one.value < two.value, "<=": one.value <= two.value, ">=": one.value >= two.value}[sign]:
            yield f"{left} must be {sign} {right}, and {_format_values([one, two])}: {because}"


def _format_values(facts: Iterable[Fact]) -> str:
    return " and ".join(f"{fact.flag} is {show(fact.value) or 'none'} ({fact.origin})" for fact in facts)
