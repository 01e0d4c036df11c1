from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from miles_core.config.schema import collect
from miles_core.config.value import check, format_choices
from miles_core.errors import ConfigError
from miles_core.plugin.discovery import discover

SCHEMA = collect([])


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=0))
def test_numbers_survive_being_typed(number):
    assert check(SCHEMA.find("train.lr"), repr(number), "--lr") == number


@example(["none"])
@given(st.lists(st.text(min_size=1, max_size=5), max_size=4))
def test_lists_from_files_keep_items_that_need_no_splitting(items):
    plain = [item.replace(",", ";").replace("[", "(") for item in items]
    expected = () if plain == ["none"] else tuple(plain)  # alone it is what to type for an empty list
    assert check(SCHEMA.find("rollout.stop"), plain, "x") == expected


def test_none_only_where_it_is_allowed():
    assert check(SCHEMA.find("data.label_key"), "None", "x") is None


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("train.lr", "a number >= 0"),
        ("rollout.batch_size", "a whole number >= 1, <= 100000"),
        ("rollout.stop", "texts, separated by commas"),
        ("algorithm.advantage_estimator", "one of grpo, dr_grpo, .* or [a-z]+"),
    ],
)
def test_an_entry_without_a_value_says_what_to_write(path, allowed):
    said = f"^run.yaml line 3: {path} has no value; write {allowed}, or leave it out for its default$"
    with pytest.raises(ConfigError, match=said):
        check(SCHEMA.find(path), None, "run.yaml line 3")


def test_a_boolean_is_no_number():
    for path in ("train.lr", "rollout.batch_size", "data.input_key"):
        with pytest.raises(ConfigError, match="cannot be True"):
            check(SCHEMA.find(path), True, "x")


def test_bounds_hold_for_every_item_of_a_list():
    with pytest.raises(ConfigError, match="cannot be -3; it must be >= 0"):
        check(SCHEMA.find("rollout.stop_token_ids"), "1,-3", "x")


def test_listing():
    assert (format_choices(("a",)), format_choices(("a", "b", "c"))) == ("a", "a, b or c")


def test_a_path_may_begin_with_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert check(SCHEMA.find("model.hf_checkpoint"), "~/model", "x") == "/home/someone/model"
    assert str(check(SCHEMA.find("save"), "~/run", "x")) == "/home/someone/run"
    assert check(SCHEMA.find("model.model_name"), "~/name", "x") == "~/name"


@pytest.mark.parametrize(
    ("typed", "words"),
    [("", "is empty"), ("a/" + "x" * 256, "holds a name of 256 bytes"), ("\u00e9" * 128, "256 bytes"), ("a\0b", "NUL")],
)
def test_what_names_no_file(typed, words):
    for path in ("save", "data.prompt_data"):
        with pytest.raises(ConfigError, match=words):
            check(SCHEMA.find(path), typed, "x")


def test_every_option_of_every_plugin_takes_its_own_default():
    """What a configuration is written with, in a run's directory or to a worker, is read again."""
    schema = collect(discover())
    for option in schema.options.values():
        assert check(option, option.default, "a file") == option.default, option.fact


def test_case_does_not_matter_where_the_values_are_listed():
    assert check(SCHEMA.find("run.log_level"), "DEBUG", "--log-level") == "debug"
    with pytest.raises(ConfigError, match="cannot be 'LOUD'; it is one of debug"):
        check(SCHEMA.find("run.log_level"), "LOUD", "--log-level")
