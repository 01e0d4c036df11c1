"""The code in README and docs works: ``python`` and ``shell`` blocks run, ``text`` blocks are only read.

A python block that starts with ``# name.py`` is a file that later blocks use. The examples of docs/hooks.md are single-file
plugins: each takes part in a toy run, with the options of its first line if that is a comment.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from miles_testing import toy_files, toy_run

ROOT = Path(__file__).parents[2]
HOOKS = ROOT / "docs" / "hooks.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"  # test_tutorial runs it
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md", "examples/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
    if path != HOOKS and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)


def blocks(path, *languages):
    """(line, language, code) of the fenced blocks in these languages."""
    text = path.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1] in languages:
            yield text[: match.start()].count("\n") + 2, match[1], match[2]


def options(code):
    """``# --flag value`` of the first line as arguments of ``toy_run``."""
    first = code.splitlines()[0]
    words = shlex.split(first[1:]) if first.startswith("# --") else []
    given = {word[2:].replace("-", "_"): value for word, value in zip(words[::2], words[1::2], strict=True)}
    return {**given, "custom_rm_path": None} if "rm_type" in given else given


@pytest.mark.parametrize(("line", "code"), [(n, c) for n, _, c in blocks(HOOKS, "python")])
def test_every_example_of_a_hook_takes_part_in_a_run(tmp_path, line, code):
    path = tmp_path / f"example_{line}.py"
    path.write_text(code)
    run = toy_run([str(path)], directory=tmp_path / "run", steps=2, **options(code))
    assert len(run.metrics) == 2 and run.run.plan.order


@pytest.mark.parametrize(
    "path",
    [p for p in PAGES if p != TUTORIAL and any(blocks(p, "python", "shell"))],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_the_blocks_of_a_page_run_one_after_the_other(path, tmp_path, monkeypatch, shell):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy_files(), tmp_path, dirs_exist_ok=True)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, language, code in blocks(path, "python", "shell"):
        where = f"{path.relative_to(ROOT)}:{line}"
        named = re.match(r"# (\w+\.py)\n", code)
        if language == "shell":
            shell(code)
        elif named:
            Path(named[1]).write_text(code)
        else:
            exec(compile(code, where, "exec"), namespace)


def test_every_block_says_what_it_is():
    known = {"python", "shell", "text", "yaml", "toml", "json", "diff"}
    for path in [*PAGES, HOOKS]:
        fences = re.findall(r"^```(\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)[::2]
        assert set(fences) <= known, f"{path.relative_to(ROOT)}: {set(fences) - known}"
