"""Python functions as tools: schemas, docstrings, arguments, and functions that cannot be tools."""

import textwrap

import pytest

from miles_core.plugin import ConfigError
from miles_tool_calls.functions import cut, load_functions, to_text
from miles_tool_calls.schema import check_schema, read_docstring

TOOLS = '''
"""Tools."""
from dataclasses import dataclass
from typing import Annotated, Literal
from json import dumps

@dataclass
class Point:
    x: float
    y: float = 0.0

def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Carefully.

    Args:
        a: the first
            number
        b (int): the second: with a colon

    Returns:
        the sum: of both
    """
    return a + b

async def find(near: Point, kind: Literal["shop", "road"] | None = None, tags: list[str] = []) -> str:
    """Find something."""
    return f"{kind} near {near.x:g} {near.y:g}"

def _helper(x):
    return x

class Notebook:
    """Notes of one conversation."""

    def write(self, text: str) -> str:
        """Write a note."""

    def close(self):
        """No tool."""
'''


@pytest.fixture
def write(tmp_path):
    def write(text, name="tools.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return write


def test_functions_of_a_file(write):
    add, find = load_functions((write(TOOLS),))
    assert add.schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.\n\nCarefully.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first number"},
                    "b": {"type": "integer", "default": 2, "description": "the second: with a colon"},
                },
                "required": ["a"],
            },
        },
    }
    assert find.is_async and not add.is_async
    assert find.schema["function"]["parameters"]["properties"]["kind"]["anyOf"][0]["enum"] == ["shop", "road"]
    assert find.bind({"near": {"x": 1}})["near"].x == 1.0


def test_a_class_and_chosen_names(write):
    path = write(TOOLS)
    (method,) = load_functions((f"{path}:Notebook",))
    assert method.name == "write" and method.owner.__name__ == "Notebook"
    assert list(method.schema["function"]["parameters"]["properties"]) == ["text"]
    assert [f.name for f in load_functions((f"{path}:find", "json:dumps")[:1])] == ["find"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "a: Field required"),
        ({"a": "x"}, "a: Input should be a valid integer"),
        ({"a": 1, "c": 2}, "c: Extra inputs are not permitted"),
    ],
)
def test_wrong_arguments_are_described_for_the_model(write, arguments, message):
    add = load_functions((f"{write(TOOLS)}:add",))[0]
    assert add.bind({"a": "3"}) == {"a": 3}  # as pydantic converts it
    with pytest.raises(ValueError, match=message):
        add.bind(arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(a: int): pass", "has no docstring"),
        ("def f(a):\n    'x'", "the argument 'a' has no type hint"),
        ("def f(*a: int):\n    'x'", r"the argument \*a: int cannot be passed by name"),
        ("def f(a: 'Nothing'):\n    'x'", "type hints cannot be resolved"),
        ("import socket\ndef f(a: socket.socket):\n    'x'", "its arguments cannot be checked"),
        ("from collections.abc import Callable\ndef f(a: Callable[[], int]):\n    'x'", "have no JSON schema"),
        ("def _f(): pass", "defines no public function"),
        ("raise OSError('disk')", "importing it raised OSError: disk"),
        ("import sys; sys.exit(3)", "importing it raised SystemExit: 3"),
        ("def f(:", "importing it raised SyntaxError"),
    ],
)
def test_files_that_are_refused(write, text, message):
    with pytest.raises(ConfigError, match=message):
        load_functions((write(text),))


def test_specifications_that_are_refused(write):
    path = write(TOOLS)
    with pytest.raises(ConfigError, match="there is no 'sub'; its functions are: add, find"):
        load_functions((f"{path}:sub",))
    with pytest.raises(ConfigError, match="it is a str; a tool is a function"):
        load_functions((f"{path}:__doc__",))
    with pytest.raises(ConfigError, match="there is no file"):
        load_functions(("missing.py",))
    with pytest.raises(ConfigError, match="there is no module 'no_such_module'"):
        load_functions(("no_such_module:f",))


@pytest.mark.parametrize(
    "text",
    [
        "Do it.\n\nParameters\n----------\na : int\n    the first\nb : int\n    the\n    second\n\nReturns\n-------\nint",
        "Do it.\n\n:param a: the first\n:param int b: the second\n:returns: x",
    ],
    ids=["numpy", "sphinx"],
)
def test_styles_of_docstrings(text):
    assert read_docstring(text) == ("Do it.", {"a": "the first", "b": "the second"})


@pytest.mark.parametrize(
    "schema",
    [5, {"type": "array"}, {"properties": []}, {"properties": {"a": 1}}, {"required": ["a"]}, {"required": 5}],
)
def test_schemas_of_servers_that_do_not_parse(schema):
    with pytest.raises(ConfigError, match="the tool x"):
        check_schema(schema, "the tool x")


def test_results_as_text():
    assert to_text("a\n", 10) == "a\n" and to_text({"ä": [1, None]}, 99) == '{"ä": [1, null]}'
    assert [to_text(v, 9) for v in (float("nan"), float("inf"), -float("inf"), 1.5)] == [
        "NaN",
        "Infinity",
        "-Infinity",
        "1.5",
    ]
    loop: list = []
    loop.append(loop)
    assert to_text(loop, 99) == "[[...]]" and to_text({1, 2}, 99) == '"{1, 2}"'
    assert cut("x" * 12, 10) == "x" * 10 + "\n[2 more characters were cut]"
