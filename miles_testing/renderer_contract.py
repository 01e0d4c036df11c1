"""Contract tests for renderers: chat messages to tokens, and tokens continued with messages.

Subclass the contract and implement ``make``::

    class TestMyTemplate(RendererContract):
        def make(self):
            return Renderer(AutoTokenizer.from_pretrained("my/model"))
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import pytest

from miles_core.chat.renderer import CannotExtend, Renderer
from miles_core.errors import DataError

_QUESTION = [{"role": "user", "content": "2 + 2 = ?"}]
_ANSWER = "It is 4"
_FOLLOWING = {
    "user": {"role": "user", "content": "And 3 + 3?"},
    "tool": {"role": "tool", "content": "6", "name": "add", "tool_call_id": "call00000"},
}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {}}}


class RendererContract(ABC):
    """Contract tests for ``miles_core.data.Renderer`` with a chat template, and for subclasses of it.

    Attributes:
        effects: role -> expected result of ``Renderer.examine``: ``appends``, ``drops reasoning``, ``rewrites`` or ``refuses``.
    """

    effects: Mapping[str, str] = {"user": "appends"}

    @abstractmethod
    def make(self) -> Renderer:
        """Make a renderer."""

    def test_a_conversation_is_the_text_of_the_template(self) -> None:
        renderer = self.make()
        tokens = renderer.render(_QUESTION)
        assert tokens == renderer.render(_QUESTION), "two calls with equal messages return different tokens"
        assert renderer.tokenizer.decode(tokens) == renderer.text(_QUESTION)
        assert _QUESTION[0]["content"] in renderer.text(_QUESTION)
        assert renderer.text(_QUESTION).startswith(renderer.text(_QUESTION, generate=False))

    def test_roles_have_the_declared_effect(self) -> None:
        renderer = self.make()
        found = {role: renderer.examine(role) for role in self.effects}
        assert found == self.effects

    def test_appending_changes_no_earlier_token(self) -> None:
        """Whatever the model sampled stays as it is, also tokens that its text would not be tokenized to."""
        renderer, draw = self.make(), random.Random(0)
        ordinary = sorted({*range(len(renderer.tokenizer))} - {*renderer.tokenizer.all_special_ids})
        prompt = renderer.render(_QUESTION)
        extended = 0
        for _ in range(20):
            before = [*prompt, *draw.choices(ordinary, k=draw.randint(1, 12))]
            for role in self.effects:
                try:
                    after = renderer.extend(list(before), [_FOLLOWING[role]])
                except DataError:  # the template rewrites or refuses; another test checks when
                    continue
                assert after[: len(before)] == before and len(after) > len(before)
                extended += 1
        assert extended or "appends" not in self.effects.values(), "no answer could be continued"

    def test_a_continuation_is_the_end_of_the_conversation(self) -> None:
        """The appended text is what the template writes after the answer when it renders the whole conversation."""
        renderer = self.make()
        for role, effect in self.effects.items():
            if effect not in ("appends", "drops reasoning"):
                continue
            answer: dict[str, Any] = {"role": "assistant", "content": _ANSWER}
            if role == "tool":
                answer["tool_calls"] = [_CALL]
            following = _FOLLOWING[role]
            tokens = [
                *renderer.render(_QUESTION),
                *renderer.tokenizer.encode(_ANSWER, add_special_tokens=False),
            ]
            appended = str(renderer.tokenizer.decode(renderer.extend(tokens, [following])[len(tokens) :]))
            whole = renderer.text([*_QUESTION, answer, following])
            before = "" if role == "tool" else _ANSWER  # calls may be written after the answer
            assert following["content"] in appended and whole.endswith(before + appended), (
                f"a message of the role {role}"
            )

    def test_templates_that_change_earlier_text_are_refused(self) -> None:
        renderer = self.make()
        tokens = [*renderer.render(_QUESTION), *renderer.tokenizer.encode(_ANSWER, add_special_tokens=False)]
        for role, effect in self.effects.items():
            if effect == "rewrites":
                with pytest.raises(CannotExtend):
                    renderer.extend(tokens, [_FOLLOWING[role]])
            elif effect == "refuses":
                with pytest.raises(DataError):
                    renderer.extend(tokens, [_FOLLOWING[role]])

    def test_special_tokens_in_messages_are_text(self) -> None:
        """A tool's output that spells the end of a turn does not end the turn."""
        renderer = self.make()
        special = {*renderer.tokenizer.all_special_ids}

        def count(content: str) -> int:
            tokens = renderer.render([{"role": "user", "content": content}])
            return sum(token in special for token in tokens)

        for literal in renderer.tokenizer.all_special_tokens:
            assert count(f"a {literal} b") == count("a b"), f"{literal} in a message becomes a special token"

    def test_wrong_messages_are_refused(self) -> None:
        renderer = self.make()
        tokens = [*renderer.render(_QUESTION), *renderer.tokenizer.encode(_ANSWER, add_special_tokens=False)]
        for messages in ([], [{"role": "assistant", "content": "5"}]):
            with pytest.raises(DataError):
                renderer.extend(tokens, messages)
