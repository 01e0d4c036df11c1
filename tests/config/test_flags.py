from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_core.config.flags import Source, build_help, parse, parse_natural
from miles_core.config.schema import collect


def test_help_shows_groups_plugins_defaults_and_choices(manifests):
    text = build_help(collect(manifests), extra=[("--dry-run", "print the plan and stop")]).format_help()
    for part in (
        "rollout:",
        "replay (plugin replay):",
        "--replay-buffer-size N",
        "default: 1024",
        "{bf16,small,tiny}",
        "shared by small, tiny",
        "enables the plugin replay",
        "sets rollout.precision = small",
        "--dry-run",
        "[NAME=]FILE,...",
    ):
        assert part in text, part
    assert text.count("--small-recipe") == 1
    assert "--no-rollout-shuffle" not in text  # what changes nothing is not shown
    kept = " ".join(text[text.index("  --save-rollouts ") :].split()[:30])
    assert "(default: on; --no-save-rollouts turns it off)" in kept


def test_both_forms_of_a_switch_are_parsed(manifests):
    words = ["--no-save-rollouts", "--rollout-shuffle", "--self-check", "--no-apply-chat-template"]
    given_ = parse(collect(manifests), words)
    assert [(a.path, a.raw) for a in given_.assignments] == [
        ("run.save_rollouts", False),
        ("data.shuffle", True),
        ("model.self_check", True),
        ("data.apply_chat_template", False),
    ]


def test_what_was_typed_is_the_origin(manifests):
    schema = collect(manifests)
    given_ = parse(schema, ["--moe-aux-loss-coeff", "1", "--rollout-shuffle", "--rollout-small", "--lr=2"])
    assert [(a.path, a.raw, a.origin) for a in given_.assignments] == [
        ("train.aux_loss_coef", "1", "--moe-aux-loss-coeff 1"),
        ("data.shuffle", True, "--rollout-shuffle"),
        ("rollout.precision", "small", "--rollout-small"),
        ("train.lr", "2", "--lr 2"),
    ]
    assert {a.source for a in given_.assignments} == {Source.FLAG}
    assert given_.problems == []


def test_abbreviations_are_not_accepted(manifests):
    assert "--rollout-temp" in parse(collect(manifests), ["--rollout-temp", "1"]).problems[0]


def test_values_of_unknown_flags_are_not_reported_as_well(manifests):
    problems = parse(collect(manifests), ["--zzz", "5", "--lr", "1", "--yyy=3"]).problems
    assert len(problems) == 2 and "--zzz" in problems[0] and "--yyy" in problems[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--no-rollout-shuffle=3"],
            "--no-rollout-shuffle takes no value, and has '3'; write --rollout-shuffle or --no",
        ),
        (["--rollout-small=3"], "--rollout-small takes no value, and has '3'; write --rollout-small"),
        (["--rollout-stop", "--lr", "1"], "--rollout-stop needs a value; one that begins with a dash"),
        (["--lr", "1", "stray"], "unexpected argument 'stray'"),
        (["--config"], "--config needs a value"),
    ],
)
def test_every_word_has_its_place(manifests, words, says):
    (problem,) = parse(collect(manifests), words).problems
    assert problem.startswith(says)


def test_numbers_and_texts_with_spaces_may_begin_with_a_dash(manifests):
    words = [
        "--min-lr",
        "-1e-6",
        "--rollout-stop",
        "- end",
        "--reward-key=-x",
        "--config",
        "a.yaml",
        "--server-x",
        "-1",
    ]
    found = parse(collect(manifests), words)
    assert [a.raw for a in found.assignments] == ["-1e-6", "- end", "-x", -1]
    assert (found.files, found.problems) == (["a.yaml"], [])


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("0.5", 0.5), ("true", True), ("[1]", [1]), ("a b", "a b"), ("", "")]
)
def test_natural(text, value):
    assert parse_natural(text) == value


@given(st.lists(st.text(max_size=8), max_size=6))
def test_no_command_line_makes_the_parser_fail(words):
    """Whatever is typed ends in assignments or sentences, never in a traceback or an exit."""
    found = parse(collect([]), words)
    assert isinstance(found.problems, list)
