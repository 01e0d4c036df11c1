"""Every prompt is looked at before the run begins."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from miles_core.config.load import load
from miles_core.data.prompts import PromptTemplate
from miles_core.errors import ConfigError, DataError
from miles_core.rollout import queue
from miles_core.rollout.queue import Limits, examine, open_prompts


class Template:
    """Renders with a function, each prompt on its own."""

    def __init__(self, render):
        self.render, self.known = render, {}

    def __call__(self, prompt, encoded=None):
        return self.render(prompt)

    def encode_texts(self, prompts):
        return [None] * len(prompts)


@pytest.fixture
def looked(tmp_path):
    """``looked(rows, limits, *flags)`` opens the rows, with a letter for a token, and examines them."""

    def call(rows, limits, *flags, render=lambda text: [ord(c) - ord("a") for c in text], check=None):
        path = tmp_path / "d.jsonl"
        path.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
        config = load(list(flags), manifests=[])
        prompts = open_prompts(config, str(path), "--prompt-data")
        examine(prompts, Template(render), config, limits, "--prompt-data", check)
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


class Tokenizer:
    """A token per letter; tokenises a list of texts at once, but no text with a z."""

    eos_token_id, eos_token, chat_template = 0, "!", ""

    def __init__(self):
        self.calls = []

    def __call__(self, texts, **_):
        self.calls.append(len(texts))
        return SimpleNamespace(input_ids=[self.encode(text) for text in texts])

    def encode(self, text, add_special_tokens=True):
        if "z" in text:
            raise TypeError("no z")
        return [ord(c) for c in text] + [self.eos_token_id] * add_special_tokens


def examine_rows(tmp_path, rows):
    path, tokenizer = tmp_path / "d.jsonl", Tokenizer()
    path.write_text("".join(json.dumps({"input": row}) + "\n" for row in rows))
    config = load(["--rollout-max-prompt-len", "3"], manifests=[])
    prompts = open_prompts(config, str(path), "--prompt-data")
    examine(prompts, PromptTemplate(tokenizer), config, Limits(), "--prompt-data")
    return [row.prompt for row in prompts], tokenizer.calls


def test_prompts_are_tokenised_together_and_the_one_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "_AT_ONCE", 4)
    assert examine_rows(tmp_path, ["aaa", "aaaa", "b", "cc", "ddd", "eeee"]) == (["aaa", "b", "cc", "ddd"], [4, 2])
    with pytest.raises(DataError, match=r"d.jsonl:6: the tokenizer cannot encode the prompt \(TypeError: no z\)"):
        examine_rows(tmp_path, ["a", "b", "c", "d", "e", "z"])


def test_no_file():
    with pytest.raises(ConfigError, match="no prompts: give --prompt-data FILE"):
        open_prompts(load([], manifests=[]), None, "--prompt-data")


def test_chats_that_end_with_an_assistant_message_are_announced(tmp_path, caplog):
    """Often they are whole conversations, whose answer the response would follow."""
    path = tmp_path / "d.jsonl"
    chat = [{"role": "user", "content": "a"}]
    chats = [chat, [*chat, {"role": "assistant", "content": "b"}]]
    path.write_text("".join(json.dumps({"input": messages}) + "\n" for messages in chats))
    config = load([], manifests=[])
    with caplog.at_level("WARNING"):
        examine(open_prompts(config, str(path), "--prompt-data"), Rendering(), config, Limits(), "--prompt-data")
    assert (
        f"--prompt-data: 1 prompts end with an assistant message, which the response continues; the first is {path}:2"
        in caplog.text
    )


class Rendering:
    """A template that writes one token per message."""

    def __init__(self):
        self.known = {}

    def encode_texts(self, prompts):
        return [None] * len(prompts)

    def __call__(self, prompt):
        return [0] * len(prompt)


def test_examined_prompts_are_not_tokenised_again(tmp_path):
    path, seen = tmp_path / "d.jsonl", []
    path.write_text("".join(json.dumps({"input": text}) + "\n" for text in ("ab", "abcd", "c")))
    config = load(["--rollout-max-prompt-len", "3"], manifests=[])
    prompts = open_prompts(config, str(path), "--prompt-data")

    def render(text):
        seen.append(text)
        return [ord(c) - ord("a") for c in text]

    template = Template(render)
    examine(prompts, template, config, Limits(), "--prompt-data")
    encode = queue.encode_rows(template, config, Limits())
    other = queue.Row("bb", place="elsewhere:1")
    assert [list(tokens) for tokens in encode([*prompts.next(2), other, *prompts.next(1)])] == [
        [0, 1],
        [2],
        [1, 1],
        [0, 1],
    ]
    assert seen == ["ab", "abcd", "c", "bb"]
