"""Rules of the repository that a reader would otherwise have to check: what core may name, what imports torch, sizes."""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

import miles_core
from miles_core.config.groups import GROUPS
from miles_core.plugin.discovery import discover
from miles_core.plugin.option import METADATA_KEY

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "miles_core").rglob("*.py"))
BACKEND = sorted((ROOT / "miles_embedded").rglob("*.py"))
SOURCES = [*CORE, *BACKEND, *sorted(ROOT.glob("plugins/*/miles_*/**/*.py"))]
FILE_LINES, FUNCTION_LINES = 440, 65  # about 400 and 60

#: Where core may name what plugins do: it tells users about them.
FEATURES = re.compile(r"\b(fp8|mxfp8|nvfp4|int4|r3|tis|sglang|megatron|ray)\b", re.IGNORECASE)
MAY_NAME = {
    "demo/inputs.py",  # the demo runs with r3 and tis
    "cli/demo.py",
    "cli/plugins.py",  # "for example: pip install miles-plugin-tis"
    "observe/hints.py",  # names the plugin that helps
}


def code_without_docs(path):
    """(line, text) of names and string literals of code; comments and docstrings are left out."""
    source = path.read_text(encoding="utf-8")
    docs = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for statement in body:
                if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                    docs.update(range(statement.lineno, statement.end_lineno + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NAME, tokenize.STRING) and token.start[0] not in docs:
            yield token.start[0], token.string


@pytest.mark.parametrize("path", CORE, ids=lambda p: p.relative_to(ROOT / "miles_core").as_posix())
def test_core_names_no_feature(path):
    if path.relative_to(ROOT / "miles_core").as_posix() in MAY_NAME:
        return
    found = [(line, text) for line, text in code_without_docs(path) if FEATURES.search(text)]
    assert not found, f"{path.name} names what plugins do: {found}"


def test_the_exceptions_are_needed():
    named = {n for n in MAY_NAME if any(FEATURES.search(t) for _, t in code_without_docs(ROOT / "miles_core" / n))}
    assert named == MAY_NAME


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_are_short(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{node.name} has {length} lines"


def test_no_file_is_called_utils():
    assert not [p for p in SOURCES if p.stem in ("utils", "util", "helpers", "misc", "common")]


def test_manifests_flags_and_the_command_line_import_no_torch():
    code = """
import sys
from miles_core.plugin.discovery import discover
found = list(discover())
assert found, "no plugin is installed"
import miles_core.config.load, miles_core.cli.main, miles_core.cli.train, miles_core.plugin.resolve
import miles_core.testing, miles_core.testing.plugin
from miles_core import Plugin, Rule, Pair, Set, Field, hookimpl, option, StashKey, MilesError
miles_core.cli.main.main(["train", "--help"])
heavy = {"torch", "transformers", "pyarrow", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_exist():
    for name in miles_core.__all__:
        assert getattr(miles_core, name) is not None
    assert set(miles_core.__all__) == {*miles_core._HOME, "__version__"}
    with pytest.raises(AttributeError, match="miles_core has no 'Plugins'"):
        _ = miles_core.Plugins


@pytest.mark.parametrize("name", list(discover()))
def test_a_plugins_page_documents_its_flags(name):
    manifest, home = discover()[name], next(ROOT.glob(f"*/*/miles_{name}"), ROOT / "miles_core").parent
    page = (home / "README.md").read_text(encoding="utf-8")
    flags = [*manifest.aliases]
    for field in dataclasses.fields(manifest.config) if manifest.config else ():
        info = field.metadata[METADATA_KEY]
        flags += [info.flag or f"--{field.name.replace('_', '-')}", *info.aliases]
    assert not [flag for flag in flags if flag not in page]


def test_every_option_of_core_is_used():
    """A flag that does nothing is a defect: some module outside of the configuration reads it."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in [*CORE, *BACKEND] if "config" not in p.parts)
    idle = [
        f"{table}.{field.name}"
        for table, group in GROUPS.items()
        for field in dataclasses.fields(group)
        if not re.search(rf"\.{field.name}\b", text)
    ]
    assert not idle
