"""Parses a model's answer into the text, reasoning and tool calls that the agent receives. The tokens are not changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles_core.chat import Call, Dialect, Malformed, find_dialect, split_reasoning
from miles_core.data import Renderer
from miles_core.plugin import ConfigError
from miles_endpoint.api_error import refuse
from miles_endpoint.messages import ChatMessage, answer_digest, make_call

if TYPE_CHECKING:
    from miles_core.plugin import Turn

log = logging.getLogger(__name__)

#: Number of tokens at the end of a prompt that are searched for the start of the reasoning.
_OPENING = 8


@dataclass(frozen=True)
class Answer:
    """An answer for the agent.

    Attributes:
        content: the text outside of reasoning and calls.
        reasoning: the reasoning; empty if there is none.
        calls: tool calls as ``messages.make_call`` returns them.
        errors: number of calls that cannot be read (they stay in ``content``), or that do not name an offered tool.
        digests: digests of the messages as which later requests may repeat this answer (``answer_digest``).
    """

    content: str
    reasoning: str
    calls: tuple[dict[str, Any], ...]
    errors: int
    digests: tuple[bytes, ...]

    def message(self) -> dict[str, Any]:
        """Return the answer as a message of the OpenAI interface."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [wire_call(call) for call in self.calls]
        return message


def wire_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call with its arguments as JSON text, as the OpenAI interface has it."""
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": text}}


class AnswerReader:
    """Reads answers of one model.

    Args:
        renderer: the chat template.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.tokenizer = renderer.tokenizer
        self.dialect: Dialect | None = None
        self.no_tools = ""
        try:
            self.dialect = find_dialect(renderer)
        except ConfigError as error:
            self.no_tools = str(error)

    def read(self, turn: Turn, tools: Sequence[Mapping[str, Any]], stop: Sequence[str], first_call: int) -> Answer:
        """Read the answer of a turn.

        Args:
            turn: the turn.
            tools: the offered tools, whose calls are read; empty leaves everything in the text.
            stop: stop strings; the text ends before the first of them.
            first_call: number of calls in earlier answers, from which this answer's calls are numbered.
        """
        text = self._text(turn)
        whole, text = text, text[: min((text.index(s) for s in stop if s in text), default=len(text))]
        answer = self._read(turn, text, tools, first_call)
        if whole == text or answer.calls:
            return answer
        full = self._read(turn, whole, tools, first_call)  # some agents put the stop string back
        return Answer(answer.content, answer.reasoning, (), answer.errors, (*answer.digests, *full.digests))

    def check_tools(self, tools: Sequence[Any]) -> None:
        """Refuse tools if the chat template has none.

        Raises:
            ApiError: the model's chat template does not support tools.
        """
        if tools and self.dialect is None:
            raise refuse(f"this model cannot be offered tools: {self.no_tools}", "tools_not_supported")

    def for_template(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Return messages for the chat template, with arguments of calls as mappings or as JSON text, whichever the template takes."""
        if self.dialect is None or not self.dialect.as_text:
            return [message.data for message in messages]
        return [
            {**m.data, "tool_calls": [wire_call(call) for call in m.data["tool_calls"]]}
            if "tool_calls" in m.data
            else m.data
            for m in messages
        ]

    def _text(self, turn: Turn) -> str:
        tokens = list(turn.response.tokens)
        ends = self.dialect.ends if self.dialect else {self.tokenizer.eos_token_id}
        while tokens and turn.response.finish == "stop" and tokens[-1] in ends:
            tokens.pop()
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def _read(self, turn: Turn, text: str, tools: Sequence[Mapping[str, Any]], first_call: int) -> Answer:
        open_ = str(self.tokenizer.decode(list(turn.prompt[-_OPENING:]))).rstrip().endswith("<think>")
        if self.dialect is None or not (tools or self.dialect.format.own_reasoning):
            reasoning, content = split_reasoning(text, open_)
            return _make_answer(content.strip(), reasoning, (), 0)
        parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        try:
            parsed = self.dialect.read(text, parameters, open_)
        except Exception as error:  # the text is the model's: a parser that fails on it must not end the run
            log.warning(
                "an answer cannot be read and is passed on as text (%s: %s): %.200r", type(error).__name__, error, text
            )
            return _make_answer(text.strip(), "", (), 1)
        valid = [call for call in parsed.calls if isinstance(call, Call)]
        malformed = [call for call in parsed.calls if isinstance(call, Malformed)]
        content = parsed.content
        if malformed:
            rest = split_reasoning(text, open_)[1].strip()
            content = "\n".join([content, *(call.text for call in malformed)]).strip() if valid else rest
        calls = [make_call(f"call{first_call + i:05d}", call.name, call.arguments) for i, call in enumerate(valid)]
        unknown = sum(call.name not in parameters for call in valid)
        return _make_answer(content, parsed.reasoning, calls, len(malformed) + unknown)


def _make_answer(content: str, reasoning: str, calls: Sequence[dict[str, Any]], errors: int) -> Answer:
    return Answer(content, reasoning, tuple(calls), errors, (answer_digest(content, calls),))
