"""Tags instead of JSON: Qwen3-Coder and GLM-4.5.

Qwen3-Coder: ``<tool_call><function=add><parameter=a>1</parameter></function></tool_call>``; GLM-4.5:
``<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>``; both are written in the models' chat templates. Values are text;
the schema of the tool decides whether a value is a text or JSON.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

from miles_core.chat.call import SHOWN, Answer, Call, Malformed, load_json, make_call

Parameters = Mapping[str, Mapping[str, Any]]

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|(?=<function=)|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|(?=<arg_key>)|\Z)", re.DOTALL)


def parse_qwen(text: str, parameters: Parameters) -> Answer:
    """Read the calls of an answer of Qwen3-Coder. The outer ``<tool_call>`` may be missing."""
    calls: list[Call | Malformed] = []
    for block in _CALL.findall(text) if "<tool_call>" in text else [text]:
        functions = _FUNCTION.findall(block)
        if not functions and "<tool_call>" in text:
            calls.append(Malformed("the call has no <function=NAME>", block[:SHOWN]))
        calls += [_typed(name, _PARAMETER.findall(body), parameters, block) for name, body in functions]
    return Answer(_FUNCTION.sub("", _CALL.sub("", text)).strip(), calls)


def parse_glm(text: str, parameters: Parameters) -> Answer:
    """Read the calls of an answer of GLM-4.5."""
    calls: list[Call | Malformed] = []
    for block in _CALL.findall(text):
        name = block.partition("<arg_key>")[0].strip()
        if not re.fullmatch(r"[\w.\-/]+", name):
            calls.append(Malformed("the call does not begin with a tool name", block[:SHOWN]))
        else:
            calls.append(_typed(name, _ARGUMENT.findall(block), parameters, block))
    return Answer(_CALL.sub("", text).strip(), calls)


def _typed(name: str, pairs: Iterable[tuple[str, str]], parameters: Parameters, text: str) -> Call | Malformed:
    name = name.strip()
    properties = parameters.get(name, {}).get("properties", {})
    arguments = {key.strip(): convert(value, properties.get(key.strip(), {})) for key, value in pairs}
    return make_call(name, arguments, text)


def convert(text: str, schema: Any) -> Any:
    """Convert the text of an argument by its schema: texts stay as they are, without one line break at each end; other types are read
    as JSON, then as a Python literal; what is neither stays a text, so that the tool's check reports it."""
    text = text.removeprefix("\n").removesuffix("\n")
    if _is_text(schema):
        return text
    try:
        return load_json(text.strip())
    except ValueError:
        pass
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text
    return value if isinstance(value, (bool, int, float, str, list, dict, type(None))) else text


def _is_text(schema: Any) -> bool:
    """Whether a schema allows a text, so that a value needs no conversion."""
    if not isinstance(schema, Mapping):
        return False
    kinds = schema.get("type")
    if kinds is not None:
        return kinds == "string" or (isinstance(kinds, (list, tuple)) and "string" in kinds)
    if "enum" in schema:
        return all(isinstance(value, str) for value in schema["enum"])
    return any(_is_text(one) for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())))
