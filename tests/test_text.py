"""Text from outside of a run becomes valid Unicode in one place."""

from __future__ import annotations

import copy
import json
import pickle
import random

import pytest

from miles_core.chat.renderer import Renderer
from miles_core.data import describe_error, valid_data, valid_text
from miles_core.data.tokenizer import load_tokenizer
from miles_core.errors import DataError
from miles_core.text import count_characters
from miles_testing.toy import toy_files

ODD = ["a\ud83d", "\udc00\ud800", "\udcffname", "\ud83d\ud83d\ude00", "\ud83d\x00\ude00"]


@pytest.mark.parametrize("text", ["", "abc", "a\x00b\x1b[0m\x7f", "é😀\u2028\ufeff", "\uffff\U0010ffff"])
def test_valid_text_stays(text):
    assert valid_text(text) is text


def test_halves_of_pairs_are_joined_or_replaced():
    assert valid_text("a\ud83d\ude00b") == "a😀b"
    assert valid_text("a\ud83db\ude00") == "a\ufffdb\ufffd"
    draw = random.Random(0)
    alphabet = ["a", "\x00", "é", "😀", "\ud83d", "\ude00", "\ud800", "\udfff", "\ufffd"]
    for _ in range(2000):
        text = "".join(draw.choices(alphabet, k=draw.randrange(6)))
        made = valid_text(text)
        assert made.encode().decode() == made == valid_text(made)
        usual = "a\x00é"
        assert [c for c in made if c in usual] == [c for c in text if c in usual]


def test_data_is_valid_down_to_its_keys():
    value = json.loads('{"a\\ud800": ["\\udc00", {"b": "\\ud83d\\ude00"}], "n": 1, "z": null}')
    assert valid_data(value) == {"a\ufffd": ["\ufffd", {"b": "😀"}], "n": 1, "z": None}
    assert count_characters(value) == 2
    deep: object = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        valid_data(deep)


def test_errors_whose_message_is_odd_are_described():
    class Evil(Exception):
        def __str__(self):
            raise KeyError("no")

    assert describe_error(ValueError("a\ud800")) == "ValueError: a\ufffd"
    assert describe_error(Evil()) == "Evil (its message cannot be read)"
    assert describe_error(KeyError()) == "KeyError"
    assert len(describe_error(ValueError("x" * 10**6))) < 2100


@pytest.mark.parametrize("text", ODD)
def test_a_tokenizer_takes_every_text(text, tmp_path):
    """Also that of a user's function, which calls it directly; and copies of it."""
    tokenizer = load_tokenizer(str(toy_files() / "model"))
    expected = tokenizer.encode(valid_text(text))
    for one in (tokenizer, pickle.loads(pickle.dumps(tokenizer)), copy.deepcopy(tokenizer)):
        assert one.encode(text) == one(text).input_ids == one([text, "b"]).input_ids[0] == expected
        assert one.tokenize(text) == one.tokenize(valid_text(text))
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).encode(text) == expected


@pytest.mark.parametrize("text", ODD)
def test_a_renderer_takes_every_text(text):
    renderer = Renderer(load_tokenizer(str(toy_files() / "model")))
    tokens = renderer.render([{"role": "user", "content": text}])
    assert tokens == renderer.render([{"role": "user", "content": valid_text(text)}])
    more = [{"role": "user", "content": text}]
    assert renderer.extend(tokens, more) == renderer.extend(tokens, [{"role": "user", "content": valid_text(text)}])


def test_whatever_a_template_raises_is_a_refusal():
    tokenizer = load_tokenizer(str(toy_files() / "model"))
    tokenizer.chat_template = "{% for m in messages %}{{ 1 // (m.content | length) }}{{ m.content.x.y }}{% endfor %}"
    for content in ("", "a", None, 3, ["x"]):
        with pytest.raises(DataError, match="the chat template refuses the prompt"):
            Renderer(tokenizer).text([{"role": "user", "content": content}])
