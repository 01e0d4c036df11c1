"""Calls between special tokens: DeepSeek and Kimi.

DeepSeek-V3 and R1 write ``function<sep>NAME`` and a fenced block of JSON between the tokens of a call, V3.1 writes ``NAME<sep>JSON``; Kimi-K2
writes ``functions.NAME:0`` and JSON. The tokens are those of the models' chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from miles_core.chat.call import SHOWN, Answer, Call, Malformed, make_call

_DEEPSEEK = {
    mark: f"<｜tool▁{mark.replace('_', '▁')}｜>"
    for mark in ("calls_begin", "calls_end", "call_begin", "call_end", "sep")
}
_FENCE = re.compile(r"\A\s*```(?:json)?\s*(.*?)\s*(?:```\s*)?\Z", re.DOTALL)
_KIMI_NAME = re.compile(r"\A\s*(?:functions\.)?(.+?)(?::\d+)?\s*\Z", re.DOTALL)


def parse_deepseek(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> Answer:
    """Read the calls of an answer of DeepSeek, in both forms."""
    content, calls_text = _section(text, _DEEPSEEK["calls_begin"], _DEEPSEEK["calls_end"], _DEEPSEEK["call_begin"])
    calls: list[Call | Malformed] = []
    for block in _blocks(calls_text, _DEEPSEEK["call_begin"], _DEEPSEEK["call_end"]):
        head, separated, rest = block.partition(_DEEPSEEK["sep"])
        if not separated:
            calls.append(Malformed("the call has no separator between name and arguments", block[:SHOWN]))
        elif head.strip() == "function" and "```" in rest:
            name, _, fenced = rest.partition("\n")
            calls.append(make_call(name, _unfence(fenced), block))
        else:
            calls.append(make_call(head, _unfence(rest), block))
    return Answer(content, calls)


def parse_kimi(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> Answer:
    """Read the calls of an answer of Kimi-K2."""
    content, calls_text = _section(
        text, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"
    )
    calls: list[Call | Malformed] = []
    for block in _blocks(calls_text, "<|tool_call_begin|>", "<|tool_call_end|>"):
        head, separated, rest = block.partition("<|tool_call_argument_begin|>")
        name = _KIMI_NAME.match(head)
        if not separated or name is None:
            calls.append(Malformed("the call has no arguments after its name", block[:SHOWN]))
        else:
            calls.append(make_call(name[1], rest, block))
    return Answer(content, calls)


def _section(text: str, begin: str, end: str, call: str) -> tuple[str, str]:
    """Split an answer into its content and its section of calls; the section's own tokens may be missing."""
    first = min((at for at in (text.find(begin), text.find(call)) if at >= 0), default=len(text))
    return text[:first].strip(), text[first:].replace(begin, "").replace(end, "")


def _blocks(text: str, begin: str, end: str) -> list[str]:
    """Return the texts of the calls in a section; a call that is not closed ends with the section."""
    return [block.partition(end)[0] for block in text.split(begin)[1:]]


def _unfence(text: str) -> str:
    found = _FENCE.match(text)
    return found[1] if found else text
