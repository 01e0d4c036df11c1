from __future__ import annotations

import pytest

from miles_core.config.groups import GROUPS
from miles_core.config.load import load
from miles_core.config.rules import RELATIONS, RULES
from miles_core.config.schema import collect
from miles_core.errors import ConfigError
from miles_core.plugin.rule import names, parse


def refused(*argv: str) -> str:
    """The message a command line is refused with; empty when it is accepted."""
    try:
        load(argv, manifests=[], environment={})
    except ConfigError as error:
        return str(error)
    return ""


def test_the_defaults_break_no_rule():
    assert refused() == ""


@pytest.mark.parametrize(
    ("argv", "allowed_with"),
    [
        (["--max-tokens-per-gpu", "100", "--micro-batch-size", "2"], ["--use-dynamic-batch-size"]),
        (["--min-lr", "1e-8"], ["--lr-decay-style", "cosine"]),
        (["--lr-decay-iters", "8"], ["--lr-decay-style", "linear"]),
        (["--loss-constant-length", "8"], ["--loss-aggregation", "constant"]),
        (["--kl-coef", "0.1"], ["--advantage-estimator", "reinforce_plus_plus"]),
        (["--gamma", "0.9"], ["--advantage-estimator", "reinforce_plus_plus_baseline"]),
        (["--eval-interval", "2"], ["--eval-prompt-data", "a.jsonl"]),
        (["--eval-prompt-data", "a.jsonl"], ["--eval-interval", "2"]),
        (["--profile-dir", "traces"], ["--profile"]),
    ],
)
def test_an_option_without_effect_is_refused(argv, allowed_with):
    message = refused(*argv)
    assert message.startswith(" ".join(argv[:2]) + ": it needs ") and "\n" not in message
    assert refused(*argv, *allowed_with) == ""


@pytest.mark.parametrize(
    "argv",
    [
        ["--global-batch-size", "8", "--num-steps-per-rollout", "2"],
        ["--rm-type", "exact", "--label-key", "answer", "--custom-rm-path", "r.py"],
    ],
)
def test_two_answers_to_one_question_are_refused(argv):
    assert "it needs" in refused(*argv)
    assert refused(*argv[:-2]) == refused(*argv[-2:]) == ""


@pytest.mark.parametrize("reward", ["exact", "boxed", "f1"])
def test_a_reward_that_compares_needs_the_column_of_the_label(reward):
    assert refused("--rm-type", reward).startswith(f"--rm-type {reward}: it needs data.label_key")
    assert refused("--rm-type", reward, "--custom-generate-function-path", "g.py") == ""  # which may set labels


def test_rules_name_options_only():
    facts = {option.fact for option in collect([]).options.values()}
    for rule in RULES:
        for condition in filter(None, (rule.needs, rule.when)):
            assert set(names(parse(condition))) <= facts, condition
        assert rule.because


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["--over-sampling-batch-size", "3"],
            "rollout.over_sampling_batch_size must be >= rollout.batch_size, and --over-sampling-batch-size is 3",
        ),
        (
            ["--rollout-max-response-len", "8", "--overlong-buffer-len", "9"],
            "--overlong-buffer-len is 9 (--overlong-buffer-len 9) and --rollout-max-response-len is 8",
        ),
        (["--min-lr", "1"], "--lr is 1e-06 (default)"),
        (
            ["--rollout-max-context-len", "2000", "--rollout-max-prompt-len", "2000"],
            "a response must fit after the prompt",
        ),
    ],
)
def test_options_that_bound_each_other(argv, says):
    assert says in refused(*argv)


def test_relations_name_options_of_core():
    schema = collect([])
    for left, _, right, because in RELATIONS:
        assert schema.options[left].group in GROUPS and schema.options[right].group in GROUPS and because


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-weight-staleness", "2"], "it needs schedule == async, and --schedule is sync"),
        (["--fully-async", "--max-weight-staleness", "0"], "--schedule sync never trains on older samples"),
        (
            ["--fully-async", "--over-sampling-batch-size", "64"],
            "--max-weight-staleness bounds the number of requested prompts",
        ),
        (
            ["--partial-rollout"],
            "a collection that requests no more prompts than it needs leaves no response unfinished",
        ),
        (["--pause-generation-mode", "in_place"], "it needs rollout.partial_rollout or schedule == async"),
        (["--mask-offpolicy-in-partial-rollout"], "only then is a response in flight while weights change"),
        (["--stale-samples", "train"], "it needs schedule == async"),
        (["--fully-async", "--no-partial-rollout", "--stale-samples", "train"], "every response is finished before"),
    ],
)
def test_options_of_schedules_that_would_do_nothing(words, says):
    assert says in refused(*words)


def test_options_of_schedules_that_go_together():
    load(["--partial-rollout", "--over-sampling-batch-size", "64"], manifests=[])
    config = load(["--fully-async", "--stale-samples", "train", "--pause-generation-mode", "in_place"], manifests=[])
    assert config.run.schedule == "async" and config.rollout.max_weight_staleness is None
