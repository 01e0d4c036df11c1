"""How many classes pass a call on: each more is a place to change when its arguments change."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def classes_with(method):
    """The classes of this distribution, without plugins, that define a method."""
    for file in sorted(ROOT.glob("miles_*/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and any(getattr(member, "name", "") == method for member in node.body):
                yield node.name


@pytest.mark.parametrize(("method", "most"), [("learn", 4), ("sleep", 6), ("wake", 6)])
def test_few_classes_pass_a_call_on(method, most):
    found = sorted(classes_with(method))
    assert 0 < len(found) <= most, found
