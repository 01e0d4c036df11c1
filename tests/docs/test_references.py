"""Modules and files that texts name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [
    path
    for kind in ("py", "md", "toml")
    for path in sorted(ROOT.rglob(f"*.{kind}"))
    if not any(part.startswith(".") or part in ("build", "dist") for part in path.relative_to(ROOT).parts)
    and path.name not in ("CHANGELOG.md", "test_references.py")
]
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


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_what_a_text_names_exists(path):
    assert list(missing(path.read_text(encoding="utf-8"))) == []


def test_a_name_that_is_gone_is_found():
    text = "see ``miles_core.loop.train``, ``miles_core.loop.nobody``, miles_core/nowhere.py and `miles_core/loop.py`"
    assert list(missing(text)) == ["miles_core.loop.nobody", "miles_core/nowhere.py"]
