"""Every prompt is looked at before the run begins."""

from __future__ import annotations

import json

import pytest

from miles_core.config.load import load
from miles_core.errors import ConfigError, DataError
from miles_core.rollout.queue import Limits, examine, open_prompts


@pytest.fixture
def looked(tmp_path):
    """``looked(rows, limits, *flags)`` opens the rows, with a letter for a token, and examines them."""

    def call(rows, limits, *flags, render=lambda text: [ord(c) - ord("a") for c in text], check=None):
        path = tmp_path / "d.jsonl"
        path.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
        config = load(list(flags), manifests=[])
        prompts = open_prompts(config, str(path), "--prompt-data")
        examine(prompts, render, config, limits, "--prompt-data", check)
        return prompts

    return call


def test_too_long_for_the_models_own_context(looked):
    rows = ["a" * n for n in (2, 5, 9, 4)]
    with pytest.raises(
        DataError, match=r"2 of 4 prompts .* within 5 tokens \(config.json\); the longest has 9 \(.*d.jsonl:3\)"
    ):
        looked(rows, Limits(5, "config.json"))
    kept = looked(rows, Limits(5, "config.json"), "--rollout-max-prompt-len", "4")
    assert [row.prompt for row in kept.next(3)] == ["aa", "aaaa", "aa"]
    with pytest.raises(DataError, match="all 4 prompts are longer than --rollout-max-prompt-len 1"):
        looked(rows, Limits(), "--rollout-max-prompt-len", "1")


def test_tokens_that_the_model_does_not_have(looked):
    with pytest.raises(DataError, match=r"d.jsonl:2: .* the token 25, but the model's vocabulary has 25"):
        looked(["a", "z"], Limits(vocabulary=25))


def test_what_tokenizer_and_checks_raise_names_the_row(looked):
    def render(text):
        raise TypeError("TextInputSequence must be str")

    with pytest.raises(DataError, match=r"d.jsonl:1: the tokenizer cannot encode the prompt \(TypeError"):
        looked(["a"], Limits(), render=render)


def test_no_file():
    with pytest.raises(ConfigError, match="no prompts: give --prompt-data FILE"):
        open_prompts(load([], manifests=[]), None, "--prompt-data")
