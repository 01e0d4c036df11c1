"""Detects whether a model's chat template supports tools, and in which format it writes calls.

A probe is rendered with the template: a schema must appear in the prompt, a tool's result must appear in the conversation, and a parser
must read back a rendered call unchanged. A template that fails is refused before the run, with what to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_core.chat.call import Answer, Call, Malformed, split_reasoning
from miles_core.chat.formats import FORMATS, Format
from miles_core.chat.renderer import Renderer
from miles_core.errors import ConfigError, DataError
from miles_core.text import valid_data, valid_text

_QUESTION = "qzjQuestionqzj"
_RESULT = "qzjResultqzj"
_PARAMETERS = {
    "type": "object",
    "properties": {"text": {"type": "string", "description": "qzjArgumentqzj"}, "count": {"type": "integer"}},
    "required": ["text"],
}
_TOOL = {
    "type": "function",
    "function": {"name": "qzj_tool", "description": "qzjDescriptionqzj", "parameters": _PARAMETERS},
}
_PROBE = Call("qzj_tool", {"text": "a b", "count": 3})
_ID = "call00000"
#: What a user can do if the template does not support tools.
ADD_TEMPLATE = "add a chat_template.jinja with tools to the checkpoint"


@dataclass(frozen=True)
class Dialect:
    """How a model writes and reads tools.

    Attributes:
        name: name of the format.
        format: the format of calls.
        as_text: the chat template takes a call's arguments as JSON text instead of a mapping.
        stops: token ids that end an answer with calls.
        ends: token ids that are not part of an answer's text: the end of a turn.
    """

    name: str
    format: Format
    as_text: bool
    stops: tuple[int, ...]
    ends: frozenset[int]

    def read(self, text: str, parameters: Any, reasoning_open: bool = False) -> Answer:
        """Read an answer, with special tokens and without the end of the turn. The texts of its calls are valid (``valid_text``), although
        JSON can write half of a surrogate pair.

        Args:
            text: the answer.
            parameters: tool name -> JSON schema of its parameters.
            reasoning_open: whether the generation prompt opened the reasoning.
        """
        if self.format.own_reasoning:
            answer = self.format.parse(text, parameters)
            reasoning = answer.reasoning
        else:
            reasoning, rest = split_reasoning(text, reasoning_open)
            answer = self.format.parse(rest, parameters)
        return Answer(answer.content, [_valid_call(call) for call in answer.calls], reasoning)

    def message(self, answer: Answer, ids: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
        """Make the chat message of an answer, for templates that render the whole conversation again."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        calls = [
            _message_call(name, call.arguments if isinstance(call, Call) else {}, id_, self.as_text)
            for id_, name, call in zip(ids, names, answer.calls, strict=True)
        ]
        return message | ({"tool_calls": calls} if calls else {})


def _valid_call(call: Call | Malformed) -> Call | Malformed:
    if isinstance(call, Malformed):
        return call
    try:
        return Call(valid_text(call.name), valid_data(call.arguments))
    except ValueError as error:
        return Malformed(f"the arguments: {error}", "", valid_text(call.name))


def _message_call(name: str, arguments: dict[str, Any], id_: str, as_text: bool) -> dict[str, Any]:
    given: Any = json.dumps(arguments, ensure_ascii=False, default=str) if as_text else arguments
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": given}}


def find_dialect(
    renderer: Renderer, name: str = "auto", mode: str = "template", otherwise: str = ADD_TEMPLATE
) -> Dialect:
    """Determine the dialect of a chat template.

    Args:
        renderer: the chat template.
        name: a key of ``FORMATS``, or auto.
        mode: ``template``, or ``text`` if the caller writes schemas, calls and results as text, in Hermes' format.
        otherwise: what a user can do if the template does not support tools, for messages.

    Raises:
        ConfigError: the template does not support tools, or writes calls in another format.
    """
    if mode == "text":
        return _make_dialect(renderer, "hermes", False)
    model = renderer.tokenizer.name_or_path or "this model"
    user = [{"role": "user", "content": _QUESTION}]
    if "qzj_tool" not in _text(renderer, user, model, otherwise):
        raise ConfigError(
            f"the chat template of {model} ignores tools: their schemas do not appear in the prompt; {otherwise}"
        )
    names = list(FORMATS) if name == "auto" else [name]
    rendered = {as_text: _render_call(renderer, as_text) for as_text in (False, True)}
    for candidate in names:
        for as_text, texts in rendered.items():
            dialect = _make_dialect(renderer, candidate, as_text)
            parameters = {"qzj_tool": _PARAMETERS}
            if any(dialect.read(text, parameters).calls == [_PROBE] for text in texts):
                _check_result(renderer, dialect, model, otherwise)
                return dialect
    shown = next((text for texts in rendered.values() for text in texts[:1]), "")
    if not any("qzj_tool" in text for texts in rendered.values() for text in texts):
        raise ConfigError(f"the chat template of {model} does not write the calls of an answer; {otherwise}")
    raise ConfigError(
        f"the tool-call format {name}: a call that the chat template of {model} writes is not read back in this format; it writes "
        f"{shown!r:.200}; the formats are: {', '.join(FORMATS)}"
    )


def _make_dialect(renderer: Renderer, name: str, as_text: bool) -> Dialect:
    tokenizer = renderer.tokenizer
    known = set(map(str, tokenizer.all_special_tokens)) | set(tokenizer.get_added_vocab())
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    stops = tuple(vocabulary[stop] for stop in FORMATS[name].stops if stop in known)
    ends = {*stops, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
    return Dialect(name, FORMATS[name], as_text, stops, frozenset(int(end) for end in ends))


def _text(renderer: Renderer, messages: list[dict[str, Any]], model: str, otherwise: str) -> str:
    try:
        return renderer.text(messages, [_TOOL])
    except DataError as error:
        raise ConfigError(f"the chat template of {model} refuses tools ({error}); {otherwise}") from error


def _render_call(renderer: Renderer, as_text: bool) -> list[str]:
    """Return the text of an answer with the probe's call, from the end of the generation prompt; two candidates, as the generation
    prompt may write more than a past answer has."""
    user = [{"role": "user", "content": _QUESTION}]
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [_message_call(_PROBE.name, _PROBE.arguments, _ID, as_text)],
    }
    try:
        prompt = renderer.text(user, [_TOOL])
        whole = renderer.text([*user, answer], [_TOOL], generate=False)
    except DataError:
        return []
    shared = os.path.commonprefix([prompt, whole])  # noqa: RUF071 - texts, not paths
    cuts = dict.fromkeys((len(shared), max(shared.rfind("<"), shared.rfind("\n") + 1)))
    texts = [whole[at:] for at in cuts if at > 0]
    end = renderer.tokenizer.eos_token or "\0"
    return [text.rstrip().removesuffix(end) for text in texts]


def _check_result(renderer: Renderer, dialect: Dialect, model: str, otherwise: str) -> None:
    """Raise ConfigError if the template does not show a tool's result."""
    call = _message_call(_PROBE.name, _PROBE.arguments, _ID, dialect.as_text)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": _PROBE.name, "tool_call_id": _ID, "content": _RESULT},
    ]
    if _RESULT not in _text(renderer, messages, model, otherwise):
        raise ConfigError(f"the chat template of {model} does not show the results of tools; {otherwise}")
