"""Converts chat messages to token ids, and continues token ids with further messages.

``extend`` never re-tokenizes text that a model generated: it keeps the tokens and appends the text that the chat template writes
between the end of an assistant turn and the next generation. It determines this text by rendering a placeholder conversation with
and without the new messages, so it does not depend on the model's output.

A template may also change earlier text when messages are appended: several families remove the reasoning of earlier turns when a
user message follows. Then no continuation of the tokens equals the rendered conversation. In this case ``extend`` raises
``CannotExtend``, and the whole conversation must be rendered, as a new branch. ``examine`` determines from the template which
roles cause this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from miles_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
#: Effect of appending a message of a role on earlier text: none; removal of reasoning; other changes; or the template raises an
#: error.
Effect = Literal["appends", "drops reasoning", "rewrites", "refuses"]

#: Placeholder for an assistant's answer in conversations that are rendered to examine the template.
_ANSWER = "qzjAnswerqzj"
_REASONING = "qzjReasonqzj"
#: Delimiters of the placeholder for a special token written in a message: private-use characters, which no template treats specially.
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"


class CannotExtend(DataError):
    """Raised if messages cannot be appended to tokens; render the whole conversation instead, as a new branch.

    Attributes:
        reason: ``reasoning``, ``rewrites`` or ``stop token``, for statistics.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Renderer:
    """The chat template of a tokenizer.

    Special tokens written in a message are encoded as ordinary text, so that a tool's output cannot end a turn.

    Args:
        tokenizer: the model's tokenizer.
        variables: variables for the chat template (``--chat-template-kwargs``), such as ``enable_thinking``.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            name = tokenizer.name_or_path or "this model"
            raise ConfigError(
                f"the tokenizer of {name} has no chat template; add chat_template.jinja to the checkpoint, or use no chat messages"
            )
        self.tokenizer, self.variables = tokenizer, dict(variables or {})
        self._special = sorted(map(str, tokenizer.all_special_tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._special)) or "(?!)")
        self._effects: dict[str, Effect] = {}

    def text(self, messages: Sequence[Message], tools: Sequence[Any] | None = None, generate: bool = True) -> str:
        """Render ``messages`` to text; with ``generate``, including the generation prompt.

        Raises:
            DataError: the template rejects the messages.
        """
        import jinja2

        try:
            rendered = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generate,
                **self.variables,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise DataError(f"the chat template refuses the prompt {messages!r:.200}: {error}") from error
        return str(rendered)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Render a conversation to token ids, including the generation prompt.

        Raises:
            DataError: the template rejects the conversation, or the result has no token.
        """
        literals: list[str] = []
        tokens = self._encode(self.text(self._without_control(messages, literals), tools), literals)
        if not tokens:
            raise DataError(f"the prompt {messages!r:.80} has no token; remove it from the data")
        return tokens

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """Append ``messages`` and a generation prompt to ``tokens``, which end with the model's answer.

        Args:
            tokens: prompt and answer as returned by the engine, with or without the end-of-turn token.
            messages: the messages to append, without assistant messages. If a template needs the names of called functions, they
                come from ``name`` and ``tool_call_id`` of tool messages.
            tools: the same tool schemas as at the beginning of the conversation.

        Returns:
            token ids that start with ``tokens``.

        Raises:
            CannotExtend: the template changes earlier text when these messages follow, or the answer ended with another token
                than the template's.
            DataError: the template rejects the messages, or ``messages`` is empty.
        """
        roles = [str(message.get("role")) for message in messages]
        if not messages or "assistant" in roles:
            raise DataError(f"extend takes at least one message and no assistant messages, got the roles {roles}")
        self._check_effects(tokens, roles)
        literals: list[str] = []
        calls_and_closing, new = self._tail(self._without_control(messages, literals), tools)
        following = self._encode(self._closing_in(calls_and_closing) + new, literals)
        if tokens[-1] == following[0]:
            return [*tokens, *following[1:]]
        if tokens[-1] in self.tokenizer.all_special_ids:
            last, wanted = (self.tokenizer.convert_ids_to_tokens(int(t)) for t in (tokens[-1], following[0]))
            raise CannotExtend(
                f"the answer ends with {last!r}, and the chat template continues with {wanted!r} before a message of the role "
                f"{roles[0]}; render the whole conversation",
                "stop token",
            )
        return [*tokens, *following]

    def examine(self, role: str) -> Effect:
        """Determine how appending a message of ``role`` after an answer affects the earlier text."""
        if role not in self._effects:
            self._effects[role] = self._determine_effect(role)
        return self._effects[role]

    def _determine_effect(self, role: str) -> Effect:
        try:
            plain = self._keeps(role, _ANSWER)
            reasoned = self._keeps(role, f"<think>\n{_REASONING}\n</think>\n\n{_ANSWER}")
        except DataError:
            return "refuses"
        return "appends" if plain and reasoned else "drops reasoning" if plain else "rewrites"

    def _keeps(self, role: str, answer: str) -> bool:
        """Return whether prompt, answer and continuation together equal the rendered whole conversation."""
        user, new = {"role": "user", "content": "question"}, _probe(role)
        prompt = self.text([user])
        history = self.text([user, _assistant([new], answer), new])
        return history == prompt + answer.removeprefix(_shared(prompt, answer)) + "".join(self._tail([new], None))

    def _check_effects(self, tokens: Sequence[int], roles: Sequence[str]) -> None:
        for role in dict.fromkeys(roles):
            effect = self.examine(role)
            if effect == "rewrites" or (effect == "drops reasoning" and self._has_reasoning(tokens)):
                what = (
                    "removes the reasoning of earlier answers"
                    if effect == "drops reasoning"
                    else "changes earlier text"
                )
                raise CannotExtend(
                    f"the chat template {what} when a message of the role {role} follows; render the whole conversation",
                    "reasoning" if effect == "drops reasoning" else "rewrites",
                )

    def _has_reasoning(self, tokens: Sequence[int]) -> bool:
        """Return whether ``tokens`` hold reasoning, complete or cut off before its end."""
        marks = [self.tokenizer.encode(mark, add_special_tokens=False) for mark in ("<think>", "</think>")]
        if all(len(mark) == 1 for mark in marks):
            return any(mark[0] in tokens for mark in marks)
        text = str(self.tokenizer.decode(list(tokens)))
        return "<think>" in text or "</think>" in text

    @cached_property
    def _closing(self) -> str:
        """The text that the template writes after an answer."""
        text = self.text(
            [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}], generate=False
        )
        if text.count(_ANSWER) != 1:
            raise ConfigError(
                "the chat template does not show an assistant's answer, so no conversation can be continued with it"
            )
        return text.partition(_ANSWER)[2]

    def _closing_in(self, text: str) -> str:
        """Return the part of ``text`` that closes an answer. ``text`` holds the answer's calls and its end; a call may also end with a
        special token."""
        if text.endswith(self._closing):
            return self._closing
        return text[max((text.rfind(special) for special in self._special if special in text), default=len(text)) :]

    def _tail(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, str]:
        """Return the texts that the template writes after an answer's content: its calls and end; and ``messages`` up to the next
        answer."""
        before = [{"role": "user", "content": "question"}, _assistant(messages, _ANSWER)]
        base = self.text(before, tools, generate=False)
        whole = self.text([*before, *messages], tools)
        if not whole.startswith(base):
            roles = ", ".join(dict.fromkeys(str(message.get("role")) for message in messages))
            raise CannotExtend(
                f"the chat template changes earlier text when a message of the role {roles} follows; render the whole conversation",
                "rewrites",
            )
        return base.partition(_ANSWER)[2], whole[len(base) :]

    def _without_control(self, messages: Sequence[Message], literals: list[str]) -> list[Message]:
        """Replace special tokens in the texts of ``messages`` with placeholders; append the originals to ``literals``."""

        def placeholder(found: re.Match[str]) -> str:
            literals.append(found[0])
            return f"{_OPEN}{len(literals) - 1}{_CLOSE}"

        def clean(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(placeholder, value)
            if isinstance(value, Mapping):
                return {key: clean(item) for key, item in value.items()}
            return [clean(item) for item in value] if isinstance(value, (list, tuple)) else value

        return [
            {key: value if key == "role" else clean(value) for key, value in message.items()} for message in messages
        ]

    def _encode(self, text: str, literals: Sequence[str]) -> list[int]:
        """Encode rendered text to token ids, with placeholders encoded as the ordinary text of their originals."""
        tokens: list[int] = []
        rest = text
        for number, literal in enumerate(literals):
            head, found, rest = rest.partition(f"{_OPEN}{number}{_CLOSE}")
            tokens += self.tokenizer.encode(head, add_special_tokens=False) if head else []
            if not found:
                raise DataError(
                    f"the chat template leaves out or moves {literal!r}, which is written in a message; remove it there"
                )
            tokens += self.tokenizer.encode(literal, add_special_tokens=False, split_special_tokens=True)
        return tokens + (self.tokenizer.encode(rest, add_special_tokens=False) if rest else [])


def _assistant(following: Sequence[Message], answer: str) -> Message:
    """Make an assistant message with the calls to which the tool messages in ``following`` respond."""
    calls = [
        {
            "id": str(message.get("tool_call_id", "call00000")),
            "type": "function",
            "function": {"name": str(message.get("name", "function")), "arguments": {}},
        }
        for message in following
        if message.get("role") == "tool"
    ]
    return {"role": "assistant", "content": answer} | ({"tool_calls": calls} if calls else {})


def _probe(role: str) -> Message:
    named = {"name": "function", "tool_call_id": "call00000"} if role == "tool" else {}
    return {"role": role, "content": "message", **named}


def _shared(prompt: str, answer: str) -> str:
    """Return the longest prefix of ``answer`` that is a suffix of ``prompt``: some generation prompts open the reasoning."""
    return next((answer[:n] for n in range(len(answer), 0, -1) if prompt.endswith(answer[:n])), "")
