"""An option that cannot have an effect is refused, or is a line of the plan."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from itertools import product

import pytest

from miles_core.config.config import plain
from miles_core.config.effects import find_idle
from miles_core.config.load import load
from miles_core.config.schema import collect
from miles_core.errors import ConfigError
from miles_core.plugin.discovery import discover
from miles_core.plugin.facts import Fact, Facts
from miles_core.plugin.rule import Compare, RuleError, Truth, evaluate, names, parse
from miles_testing import plan

SCHEMA = collect(discover())
CONDITIONAL = [option for option in SCHEMA.options.values() if option.info.only_if]
#: Without those whose flag belongs to another plugin, too, which always uses it.
REFUSED = [o for o in CONDITIONAL if all(each.info.only_if for each in SCHEMA.flag_of(o.path).options)]


def other_value(option):
    """A value of an option that is not its default and switches it on."""
    for choice in (*option.choices, *((True,) if option.is_bool else ())):
        if choice != option.default and not (option.is_list and choice in option.default):
            return choice
    if option.is_list:
        return "x"
    number = (option.default or 0) + 1 if option.inner in (int, float) else "x"
    bound = option.info.le or option.info.lt
    return number if bound is None or not isinstance(number, (int, float)) or number <= bound else bound * 0.9


def compared(condition):
    """The values that a condition compares facts with."""
    if isinstance(condition, Compare):
        return condition.values
    return [value for part in getattr(condition, "parts", None) or (condition.part,) for value in compared(part)]


def facts_without(option):
    """Facts with which the condition of an option is false: one value for all facts that it names, else any values."""
    condition = parse(option.info.only_if)
    base = [Fact(o.fact, plain(o.default), "default", flag=o.flag) for o in SCHEMA.options.values()]
    known = [[]] if {*names(condition)} <= {fact.name for fact in base} else []
    named, values = list(dict.fromkeys(names(condition))), (None, 0, 1, False, "bf16", "other", *compared(condition))
    mixed = product((None, 1), repeat=len(named))
    for chosen in (*zip(*[values] * len(named), strict=True), *mixed):
        known.append([Fact(*each, "default", flag=f"--{each[0]}") for each in zip(named, chosen, strict=True)])
    for named in known:
        found = Facts([*base, *named])
        with suppress(RuleError):  # a text has no order
            if evaluate(condition, found.lookup) is Truth.FALSE:
                return found
    raise AssertionError(f"no facts make {option.info.only_if} false")


@pytest.mark.parametrize("option", REFUSED, ids=lambda option: option.path)
def test_every_option_with_a_condition_is_refused_without_it(option):
    value = other_value(option)
    facts = facts_without(option)
    given = Fact(option.fact, value, f"{option.flag} {value}", flag=option.flag, chosen=True)
    (idle,) = find_idle(SCHEMA, facts.with_facts([given]), plugins=(option.owner,))
    assert not idle.harmless and "\n" not in idle.message
    assert idle.message.startswith(f"{option.flag} {value}: it needs {parse(option.info.only_if)}, and ")
    assert idle.message.endswith(f"change that, or leave {option.flag} out")
    unset = dataclasses.replace(given, chosen=False)
    assert not list(find_idle(SCHEMA, facts.with_facts([unset]), plugins=(option.owner,)))
    as_default = dataclasses.replace(given, value=plain(option.default))
    assert all(each.harmless for each in find_idle(SCHEMA, facts.with_facts([as_default]), plugins=(option.owner,)))


def test_conditions_name_facts_that_exist():
    known = {option.fact for option in SCHEMA.options.values()}
    for option in CONDITIONAL:
        for name in names(parse(option.info.only_if)):
            assert name in known or name.startswith("model."), f"{option.path}: {name}"


def refused(*argv):
    with pytest.raises(ConfigError) as error:
        load(argv, manifests=[], environment={})
    return str(error.value)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--kl-loss-type", "k1"], "it needs algorithm.kl_loss_coef > 0, and --kl-loss-coef is 0.0 (default)"),
        (["--eval-temperature", "0"], "it needs evaluation.prompt_data"),
        (["--overlong-penalty-factor", "2"], "it needs reward.overlong_buffer_len"),
        (["--lambd", "0.9"], "it needs algorithm.advantage_estimator not in"),
        (["--sft-lr", "1e-4"], "it needs sft.data"),
        (["--async-save"], "it needs save_interval"),
        (["--keep", "2"], "it needs save_interval or load"),
        (["--chat-template-kwargs", "a=1"], "it needs data.apply_chat_template or rollout.generate != turn"),
    ],
)
def test_an_option_without_its_condition(argv, says):
    assert refused(*argv).startswith(f"{' '.join(argv)}: {says}")


@pytest.mark.parametrize("size", [3, 5, 16])
def test_a_batch_size_that_does_not_divide_a_rollout_is_refused(size):
    words = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--global-batch-size"]
    message = refused(*words, str(size))
    assert f"--global-batch-size {size}: a rollout step has 8 samples" in message
    fits = message.rpartition("give ")[2].split(" or ")
    assert fits == {3: ["2", "4"], 5: ["4", "8"], 16: ["8"]}[size]
    for number in fits:
        load([*words, number], manifests=[], environment={})
    assert "give at most 8" in refused(*words[:4], "--num-steps-per-rollout", "9")


def test_a_rollout_function_may_return_any_number_of_samples():
    words = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--global-batch-size", "3"]
    load([*words, "--custom-generate-function-path", "f.py"], manifests=[], environment={})


@pytest.mark.parametrize("words", [["--kl-loss-coef", "0"], ["--kl-loss-type", "low_var_kl"]])
def test_what_the_user_switched_off_or_left_as_it_is_is_a_line_of_the_plan(words):
    options = {"kl_loss_type": "k1"} | {words[0][2:].replace("-", "_"): words[1]}
    advice = plan(**options).advice
    assert any(line.startswith("no effect: ") and "algorithm.kl_loss_coef > 0" in line for line in advice)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr_warmup_iters": 8, "num_rollout": 2}, "the learning rate only reaches 25% of --lr"),
        ({"save_interval": 9, "num_rollout": 2}, "the only checkpoint is the one at its end"),
        (
            {"micro_batch_size": 2, "use_dynamic_batch_size": True},
            "--micro-batch-size has no effect with --use-dynamic-batch-size",
        ),
        ({"emulate_precision": True}, "--emulate-precision has no effect without a number format"),
        (
            {"sync_bucket_size": 2**20},
            "no effect: --sync-bucket-size limits what an engine in another process receives",
        ),
        ({"max_restarts": 1}, "no effect: --max-restarts counts lost workers, and this run has none"),
        ({"sharding_strategy": "no_shard"}, "no effect: --sharding-strategy is about several trainer ranks"),
        ({"embedded_disable_cuda_graph": True}, "no effect: --embedded-disable-cuda-graph is about GPUs"),
        ({"allow_mismatch": True, "self_check": False}, "no effect: --allow-mismatch is about the comparison"),
    ],
)
def test_options_that_change_nothing_in_this_run_are_lines_of_the_plan(options, says):
    assert any(says in line for line in plan(**options).advice)


def test_a_condition_about_the_model_is_decided_by_the_plan():
    with pytest.raises(ConfigError, match=r"--aux-loss-coef 0\.1: it needs model\.moe, and model\.moe is false"):
        plan(aux_loss_coef=0.1, facts=["model.moe=false"])


def continued(tmp_path, *words, first=("--lr-decay-style", "cosine", "--num-rollout", "10")):
    """The message for a run that continues one with the options ``first``; empty if it may start."""
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    first = load(first, manifests=[], environment={})
    (tmp_path / "config.yaml").write_text(first.to_yaml())
    try:
        load(["--load", str(tmp_path), *words], manifests=[], environment={})
    except ConfigError as error:
        return str(error)
    return ""


def test_a_longer_run_does_not_silently_raise_a_decayed_learning_rate(tmp_path):
    message = continued(tmp_path, "--num-rollout", "20")
    assert "20 optimiser steps instead of the 10" in message and "--lr-decay-iters 10 keeps the decay" in message
    assert continued(tmp_path) == continued(tmp_path, "--num-rollout", "20", "--lr-decay-iters", "10") == ""
    assert continued(tmp_path, "--num-rollout", "20", "--lr-decay-style", "constant") == ""


@pytest.mark.parametrize(
    ("before", "now", "reset"),
    [
        (("--rm-type", "f1", "--label-key", "label"), ("--custom-rm-path", "r.py:f"), ("--rm-type", "none")),
        (("--custom-rm-path", "r.py:f"), ("--rm-type", "f1", "--label-key", "label"), ("--custom-rm-path", "none")),
        (
            ("--gamma", "0.9", "--advantage-estimator", "reinforce_plus_plus"),
            ("--advantage-estimator", "rloo"),
            ("--gamma", "1.0"),
        ),
    ],
)
def test_an_option_of_the_continued_run_that_now_violates_a_rule_can_be_reset(tmp_path, before, now, reset):
    message = continued(tmp_path, *now, first=before)
    flag, default = reset
    assert message.endswith(
        f"; --load continues a run with {flag} {before[before.index(flag) + 1]}: {flag} {default} resets it"
    )
    assert continued(tmp_path, *now, *reset, first=before) == ""
    with pytest.raises(ConfigError) as caught:  # both options are the user's: no run is continued
        load([*before, *now], manifests=[], environment={})
    assert "--load" not in str(caught.value)
