"""Modules and files that texts name exist."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def folders():
    """The folders of the repository with files of text, and these files; without environments and what is built."""
    for folder, inner, names in os.walk(ROOT):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in ("build", "dist"))
        texts = [Path(folder, name) for name in sorted(names) if name.endswith((".py", ".md", ".toml"))]
        if texts := [text for text in texts if text.name not in ("CHANGELOG.md", "test_references.py", "renamed.toml")]:
            yield Path(folder).relative_to(ROOT).as_posix(), texts


FOLDERS = dict(folders())
#: ``miles_core.precision.format.Format``, and ``miles_core/loop.py``.
DOTTED = re.compile(r"(?<!api/)\b(miles_(?:core|embedded)(?:\.[A-Za-z]\w*)+)")
PATH = re.compile(r"(?<![\w./-])((?:miles_core|miles_embedded|docs|benchmarks)/[\w./-]*\w)")


def missing(text):
    """What a text names that is not there; capitals stand for any name."""
    for named in DOTTED.findall(text):
        parts = named.split(".")
        known = max(n for n in range(1, len(parts) + 1) if _module(parts[:n]))
        if known < len(parts) and not re.search(rf"\b{parts[known]}\b", _module(parts[:known]).read_text("utf-8")):
            yield named
    yield from (path for path in PATH.findall(text) if not re.search("[A-Z]{4}", path) and not (ROOT / path).exists())


def _module(parts):
    path = ROOT.joinpath(*parts)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@pytest.mark.parametrize("folder", FOLDERS)
def test_what_the_texts_of_a_folder_name_exists(folder):
    found = {path.name: list(missing(path.read_text(encoding="utf-8"))) for path in FOLDERS[folder]}
    assert {name: gone for name, gone in found.items() if gone} == {}


def test_a_name_that_is_gone_is_found():
    text = "see ``miles_core.loop.train``, ``miles_core.loop.nobody``, miles_core/nowhere.py and `miles_core/loop.py`"
    assert list(missing(text)) == ["miles_core.loop.nobody", "miles_core/nowhere.py"]
