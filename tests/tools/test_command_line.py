"""Other programs' command lines in the words used here, and the one line that works."""

import shlex

import pytest

from miles_core.config.load import load
from miles_core.config.schema import collect
from miles_core.plugin import ConfigError, Plugin, option
from miles_embedded.manifest import plugin as embedded
from miles_tools import plugin as tools
from miles_tools.command_line import COMPLETE
from miles_tools.foreign.translate import translate, translate_value


@pytest.mark.parametrize(
    ("table", "words", "found"),
    [
        ({"": ""}, [], []),
        ({"": ""}, ["1"], None),
        ({"*": "--size {}"}, ["8"], ["--size", "8"]),
        ({"*": "--size {}"}, ["a b {0}"], ["--size", "a b {0}"]),
        ({"adam": ""}, ["sgd"], None),
        ({"* *": "--data {0}={1}"}, ["aime", "f.jsonl"], ["--data", "aime=f.jsonl"]),
        ({"**": "--sizes {list}"}, ["1", "2", "4"], ["--sizes", "1,2,4"]),
    ],
)
def test_a_table_says_what_stands_for_a_flag(table, words, found):
    assert translate_value(table, words) == found


def said(line, *plugins):
    with pytest.raises(ConfigError) as error:
        load(shlex.split(line), manifests=(tools, *plugins), environment={})
    return str(error.value)


def working(text):
    return shlex.split(text.rsplit(COMPLETE, 1)[1])[2:]


SLIME = (
    "--rm-type deepscaler --label-key label --use-kl-loss --balance-data --rollout-seed 7 --wandb-run-id x --wandb-key SECRET "
    "--eval-interval 5 --eval-prompt-data aime /data/aime.jsonl --lr 1e-6"
)


def test_a_pasted_command_line_is_answered_with_the_one_that_works():
    text = said(SLIME)
    line = working(text)
    config = load(line, manifests=(tools,), environment={})
    assert config.get("train.seed") == 7 and config.get("evaluation.prompt_data") == ("aime=/data/aime.jsonl",)
    assert config.get("reward.rm_type") == "math" and "what is left" not in text


def test_a_key_is_not_repeated():
    assert "SECRET" not in said(SLIME) and "WANDB_API_KEY" in said(SLIME)


def test_what_a_translation_does_not_solve_stands_above_it():
    text = said(SLIME + " --lr-decay-style bogus --frobnicate 3")
    left = text.split("translated ")[0]
    assert "bogus" in left and "--use-kl-loss" not in left and "not known, and left out:\n  --frobnicate 3" in text


def make(name, flag, **fields):
    from dataclasses import make_dataclass

    config = make_dataclass("C", [(f"{name}_size", int, option(1, flag=flag, help="h"))], frozen=True, kw_only=True)
    return Plugin(name=name, summary="s", version="1", core="~=0.1", config=config, **fields)


PLUGINS = (
    make("first", "--first-size"),
    make("second", "--second-size", foreign_flags={"--old-size": {"*": "--second-size {}"}}),
    make("driver", "--driver-size", provides={"trainer": {"driver": "m:f"}}),
)


def test_a_translated_flag_enables_its_plugin():
    text = said("--first-size 2 --old-size 3 --driver-size 4", *PLUGINS)
    config = load(working(text), manifests=PLUGINS, environment={})
    assert set(config.plugins) == {"first", "second", "driver"} and config.get("second.second_size") == 3


def test_a_plugin_of_a_backend_is_named_if_another_backend_was_selected():
    text = said("--trainer embedded --driver-size 2 --first-size 3", *PLUGINS, embedded)
    assert "--driver-size 2: it belongs to the plugin driver" in text
    line = working(text)
    assert line[line.index("--trainer") + 1] == "driver" and "--plugins" not in line


def test_a_command_line_that_needs_no_translation_is_left_alone():
    argv = ["--lr", "1e-6", "--eval-prompt-data", "aime=x.jsonl"]
    found = translate(argv, collect(()))
    assert found.line == argv and not found.changed and not found.dropped and not found.unknown


def test_flags_about_the_weight_update_of_miles_have_a_translation():
    line = working(said("--check-weight-update-equal --update-weight-transfer-mode p2p --use-kl-loss --lr 1e-6"))
    assert "--verify-logprobs" in line and not any("transfer" in word for word in line)
