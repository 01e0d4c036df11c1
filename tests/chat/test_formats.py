"""Tool calls in the formats of the model families, as their chat templates write them, and malformed ones."""

import math
import random

import pytest

from miles_core.chat import Call, Malformed, split_reasoning, strip_reasoning
from miles_core.chat.formats import FORMATS

PARAMETERS = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    },
    "search": {"type": "object", "properties": {"query": {"type": "string"}, "fields": {"type": "array"}}},
}
ADD, SEARCH = Call("add", {"a": 1, "b": None}), Call("search", {"query": 'a "b"\n<c>', "fields": ["x", {"y": False}]})
Q = r"\"b\"\n<c>"
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
FIRST, LAST = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ADD_JSON = '{"a": 1, "b": null}'
SEARCH_JSON = '{"query": "a ' + Q + '", "fields": ["x", {"y": false}]}'

#: format -> an answer with content and both calls.
WRITTEN = {
    "hermes": 'Let me see.\n<tool_call>\n{"name": "add", "arguments": '
    + ADD_JSON
    + '}\n</tool_call>\n<tool_call>\n{"name": "search", "arguments": '
    + SEARCH_JSON
    + "}\n</tool_call>",
    "qwen_xml": "Let me see.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nnull\n</parameter>\n</function>\n"
    '</tool_call>\n<tool_call>\n<function=search>\n<parameter=query>\na "b"\n<c>\n</parameter>\n<parameter=fields>\n["x", {"y": false}]\n'
    "</parameter>\n</function>\n</tool_call>",
    "glm": "Let me see.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>null</arg_value>\n"
    '</tool_call>\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a "b"\n<c></arg_value>\n<arg_key>fields</arg_key>\n<arg_value>["x", '
    '{"y": false}]</arg_value>\n</tool_call>',
    "mistral": 'Let me see.[TOOL_CALLS][{"name": "add", "arguments": '
    + ADD_JSON
    + ', "id": "call00000"}, {"name": "search", "arguments": '
    + SEARCH_JSON
    + ', "id": "call00001"}]',
    "deepseek": f"Let me see.{FIRST}{BEGIN}function{SEP}add\n```json\n{ADD_JSON}\n```{END}\n{BEGIN}function{SEP}search\n```json\n{SEARCH_JSON}\n"
    f"```{END}{LAST}",
    "kimi": "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    f"{ADD_JSON}<|tool_call_end|><|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{SEARCH_JSON}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "gpt_oss": "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    f"<|constrain|>json<|message|>{ADD_JSON}<|call|><|start|>assistant to=functions.search<|channel|>commentary json<|message|>{SEARCH_JSON}<|call|>",
    "llama": 'Let me see.<|python_tag|>{"name": "add", "parameters": '
    + ADD_JSON
    + '}; {"name": "search", "parameters": '
    + SEARCH_JSON
    + "}",
    "pythonic": "Let me see.<|tool_call_start|>[add(a=1, b=None), search(query='a \"b\"\\n<c>', fields=['x', {'y': False}])]<|tool_call_end|>",
}


@pytest.mark.parametrize("name", FORMATS)
def test_parallel_calls_and_content(name):
    answer = FORMATS[name].parse(WRITTEN[name], PARAMETERS)
    assert answer.calls == [ADD, SEARCH]
    assert answer.content == "Let me see."


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_without_calls(name):
    brackets = ("[Note: no tool helps here.] It is 4.", "[]", "{x | x > 0} is open.")
    for text in ("It is 4.", "", '["a", 1]', '{"answer": 4}', "a < b > c", *brackets):
        answer = FORMATS[name].parse(text, PARAMETERS)
        assert answer.calls == [] and answer.content == text


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("deepseek", f"{FIRST}{BEGIN}add{SEP}{ADD_JSON}{END}{LAST}", [ADD]),  # V3.1
        ("mistral", f"[TOOL_CALLS]add[ARGS]{ADD_JSON}[TOOL_CALLS]search[CALL_ID]x1[ARGS]{SEARCH_JSON}", [ADD, SEARCH]),  # v11, v13
        ("llama", '{"name": "add", "parameters": ' + ADD_JSON + "}", [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": null}"}', [ADD]),  # twice encoded, not closed
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', [Call("now", {})]),
        ("qwen_xml", "<function=now>\n</function>", [Call("now", {})]),
        ("qwen_xml", "<tool_call><function=search><parameter=query></parameter></function></tool_call>", [Call("search", {"query": ""})]),
        ("qwen_xml", "<tool_call><function=add><parameter=a>True</parameter>", [Call("add", {"a": True})]),
        ("glm", "<tool_call>now</tool_call>", [Call("now", {})]),
        ("pythonic", "[now()]", [Call("now", {})]),
        ("gpt_oss", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.add<|channel|>commentary<|message|>{ADD_JSON}", [ADD]),
    ],
)  # fmt: skip
def test_variants(name, text, calls):
    assert FORMATS[name].parse(text, PARAMETERS).calls == calls


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', "not valid JSON"),
        ("hermes", "<tool_call>add(1, 2)</tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "no tool name"),
        ("hermes", '<tool_call>{"name": 5}</tool_call>', "no tool name"),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be a JSON object"),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{a}"}</tool_call>', "arguments are not valid JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is not a JSON number"),
        ("hermes", "<tool_call>" + "[" * 100000 + "</tool_call>", "nested too deeply"),
        ("hermes", "<tool_call>" + "1" * 5000 + "</tool_call>", "not valid JSON"),
        ("hermes", "<tool_call>5</tool_call>", "must be a JSON object"),
        ("qwen_xml", "<tool_call>add 1</tool_call>", "no <function=NAME>"),
        ("glm", "<tool_call>add the numbers!</tool_call>", "does not begin with a tool name"),
        ("mistral", "[TOOL_CALLS]add now", "not valid JSON"),
        ("mistral", "[TOOL_CALLS]add{", "not valid JSON"),
        ("deepseek", f"{FIRST}{BEGIN}add{END}", "no separator"),
        ("deepseek", f"{BEGIN}add{SEP}{{", "arguments are not valid JSON"),
        ("kimi", "<|tool_call_begin|>functions.add:0<|tool_call_end|>", "no arguments"),
        ("llama", "<|python_tag|>print(1)", "not valid JSON"),
        ("llama", '<|python_tag|>{"name": "add", "parameters": {}', "not valid JSON"),
        ("llama", '[{"name": "add", "parameters": ', "not valid JSON"),
        ("llama", "{'name': 'add'}", "not valid JSON"),
        ("gpt_oss", "<|channel|>commentary to=functions.add<|message|>a=1<|call|>", "arguments are not valid JSON"),
        ("pythonic", "[add(1)]", "must be named"),
        ("pythonic", "[add(a=b)]", "not a literal"),
        ("pythonic", "[add(**{})]", "cannot be unpacked"),
        ("pythonic", "[add(a=1)", "not valid Python"),
        ("pythonic", "<|python_start|>[add", "not valid Python"),
    ],
)
def test_malformed_calls(name, text, reason):
    calls = FORMATS[name].parse(text, PARAMETERS).calls
    assert len(calls) == 1 and isinstance(calls[0], Malformed)
    assert reason in calls[0].reason and len(calls[0].text) <= 200


def test_a_malformed_call_does_not_hide_the_next():
    first, second = FORMATS["hermes"].parse("<tool_call>x<tool_call>" + '{"name": "now"}</tool_call>', {}).calls
    assert isinstance(first, Malformed) and second == Call("now", {})


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "rest"),
    [
        ("<think>\na <tool_call>b\n</think>\n\nc", False, "a <tool_call>b", "\n\nc"),
        ("a</think>c", True, "a", "c"),
        ("<think>\na <tool_call>{", False, "a <tool_call>{", ""),
        ("a <tool_call>{", True, "a <tool_call>{", ""),
        ("a", False, "", "a"),
    ],
)
def test_calls_inside_of_reasoning_are_not_calls(text, opened, reasoning, rest):
    assert split_reasoning(text, opened) == (reasoning, rest)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>7</think> 4", " 4"),
        ("7</think>8</think>4", "4"),
        ("<seed:think>7</seed:think>4", "4"),
        ("[THINK]7[/THINK]4", "4"),
        ("<reasoning>\n7\n</reasoning>\n4", "\n4"),
        ("<thinking>7</thinking>4", "4"),
        ("analysisIt is 7?assistantfinal4", "4"),
        (" <think>7", ""),
        ("<thought>7", ""),
        ("[THINK]7", ""),
        ("I think 4", "I think 4"),
        ("the assistantfinal word", "the assistantfinal word"),
        ("", ""),
    ],
)
def test_an_answer_is_what_follows_the_reasoning(text, answer):
    assert strip_reasoning(text) == answer


def test_harmony_separates_its_reasoning():
    text = '<|channel|>analysis<|message|>to=functions.add {"a": 1}<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>'
    answer = FORMATS["gpt_oss"].parse(text, {})
    assert (answer.reasoning, answer.content, answer.calls) == ('to=functions.add {"a": 1}', "4", [])


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    BEGIN,
    END,
    SEP,
    FIRST,
    "<function=",
    "<parameter=a>",
    "<|message|>",
]
MARKS += [
    "<arg_key>",
    "</arg_key>",
    "<|channel|>",
    "to=functions.f",
    "<|python_tag|>",
    "[f(a=",
    ")]",
    '{"name": "f"',
    "}",
    "{",
    "<|tool_call_begin|>",
]


def test_no_text_raises():
    draw = random.Random(0)
    for _ in range(400):
        pieces = [draw.choice([*MARKS, "a", " ", "\n", '"', ":", ",", "0", "é"]) for _ in range(draw.randint(0, 12))]
        for name, one in FORMATS.items():
            for call in one.parse("".join(pieces), PARAMETERS).calls:
                assert isinstance(call, (Call, Malformed)), name
                if isinstance(call, Call):
                    assert call.name and not any(
                        isinstance(v, float) and math.isnan(v) for v in call.arguments.values()
                    )
