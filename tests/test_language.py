"""Plain English: no patterns in docstrings, comments and pages that make a reader stop.

``CONTRIBUTING.md`` has the list with replacements. Pages must be free of them; the code has a ratchet: ``ALLOWED`` holds how many findings each
package still has. Lower a number when you remove findings, never raise one::

    python tests/test_language.py              # counts by package
    python tests/test_language.py miles_core   # file:line of every finding there
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Where every page must be free of findings.
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "plugins/*/README.md",
        "examples/*/README.md",
        "recipes/*.md",
        "benchmarks/*.md",
    )
    for path in ROOT.glob(pattern)
    # The changelog's old entries are history, CONTRIBUTING.md quotes the patterns, flags.md is written from the help of options.
    if path.name not in ("CHANGELOG.md", "CONTRIBUTING.md", "flags.md")
    and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)

#: Findings that a package may still have; they may only fall.
ALLOWED: dict[str, int] = {
    "benchmarks": 1,
    "docs": 1,
    "miles_core": 6,
    "miles_embedded": 1,
    "miles_formats": 3,
    "miles_testing": 1,
    "miles_tools": 6,
    "miles_workers": 1,
    "plugins/cpu_kernels": 1,
    "plugins/megatron": 5,
    "plugins/mxfp8": 1,
    "plugins/planner": 1,
    "plugins/ray": 1,
    "plugins/sglang": 4,
    "plugins/speculative": 2,
    "plugins/tis": 2,
    "plugins/zero_copy": 4,
    "tests": 29,
}

_UNIT = (
    "(?:token|row|step|sample|rank|layer|tensor|group|GPU|engine|worker|process|bucket|policy|plugin|page|file|prompt|logit|line|replica|"
    "metric|expert|head|second|pass|call|weight|matrix)"
)
_AUXILIARY = r"(?:is|are|was|were|be|been|being|gets?|got)"
#: What is looked for in prose -> what to write. A pattern must not match any sentence that is worth keeping as it is.
PATTERNS = {
    r"\banew\b": "again, or from the start",
    r"\bnobody\b": "no component, no user, nothing",
    rf"\b{_AUXILIARY} told\b(?! apart)|\btold (?:by|with|together|from|what|which)\b": "reports, notifies, receives",
    rf"\b{_AUXILIARY} said\b|\bas said\b|\bwhat (?:is|was) said\b": "stated, recorded, configured",
    rf"\b(?:one|two) (?:\w+ )?{_UNIT}s? an? {_UNIT}\b": "one token per row",
    r"\beach (?:of them )?in its own\b": "each has a separate ...",
    r"\bby what (?:it|they) (?:is|are)\b": "by type, by kind",
    r"\b(?:is|are) no (?:part|prefix|matter|business) of\b": "does not belong to",
    r"\bends? (?:with|in) a sentence\b|\bwith a sentence\b|\bin a sentence that\b": "stops with a one-line error",
    r"\bstands? (?:in|at|above|below|under|beside|behind)\b": "is located, is stored, is listed",
    r"\blies? (?:at|beside|behind)\b": "is located, is stored",
    r"\binside of\b": "inside",
    r"\bheld against\b": "compared with",
    r"\bthe same to the bit\b": "bit-identical",
}
FOUND = re.compile(
    "|".join(f"(?P<p{number}>{pattern})" for number, pattern in enumerate(PATTERNS)).replace(" ", r"\s+"), re.IGNORECASE
)

#: Functions are verbs or verb phrases: names that are one bare participle.
PARTICIPLES = (
    "asked bounded built chosen combined counted divided drawn filled found gathered given guarded held joined kept known laid made matched meant "
    "measured named ordered paused placed said scored sent settled shown sorted spelled spread taken told written"
)
BARE = re.compile(rf"^\s*(?:async )?def _*(?:{'|'.join(PARTICIPLES.split())})_*\(", re.MULTILINE)

#: Code blocks, and parts of pages that are written from docstrings, which count as code.
_FENCE = re.compile(r"^```.*?^```$|^<!-- \w+: drawn.*?^<!-- /\w+ -->$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``[^`]*``|`[^`]*`|\[[^\]]*\]\([^)]*\)|\"[^\"]*\"")


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "·", match[0])


def findings_in(text: str, line: int = 1) -> Iterator[tuple[int, str]]:
    """(line number, message) of a text's findings; code, links and quotations are left out."""
    text = _CODE.sub(_blank, _FENCE.sub(_blank, text))
    for match in FOUND.finditer(text):
        wanted = list(PATTERNS.values())[int(match.lastgroup[1:])] if match.lastgroup else ""
        yield line + text.count("\n", 0, match.start()), f"{' '.join(match[0].split())!r}: write {wanted}"


def findings_in_code(source: str) -> Iterator[tuple[int, str]]:
    """The same of docstrings and comments of a module, and functions whose name is a bare participle."""
    for match in BARE.finditer(source):
        name = match[0].split("def ")[1].rstrip("(")
        yield source.count("\n", 0, match.end()) + 1, f"the function {name}: name it by a verb"
    if not FOUND.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield from findings_in(first.value.value, first.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from findings_in(token.string.lstrip("#: "), token.start[0])


@cache
def packages() -> dict[str, list[Path]]:
    """Import package -> its modules; tests of the repository count as one, those of plugins with their plugin."""
    found = {path.parent.name: sorted(path.parent.rglob("*.py")) for path in ROOT.glob("miles_*/__init__.py")}
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        found[f"plugins/{path.parent.name}"] = sorted(path.parent.rglob("*.py"))
    found["examples"] = sorted(ROOT.glob("examples/**/*.py"))
    found["benchmarks"] = sorted(ROOT.glob("benchmarks/**/*.py"))
    found["docs"] = sorted(ROOT.glob("docs/*.py"))
    found["tests"] = sorted(path for path in ROOT.glob("tests/**/*.py") if path != Path(__file__))
    return found


def listed(path: Path) -> list[str]:
    """``file:line: message`` of a file's findings."""
    text = path.read_text(encoding="utf-8")
    found = findings_in_code(text) if path.suffix == ".py" else findings_in(text)
    return [f"{path.relative_to(ROOT).as_posix()}:{line}: {message}" for line, message in found]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_page_is_in_plain_english(path):
    found = listed(path)
    assert not found, "\n" + "\n".join(found)


def test_the_code_has_no_more_findings_than_before():
    found = {name: [line for path in paths for line in listed(path)] for name, paths in packages().items()}
    more = [
        f"{name}: {len(lines)}, allowed {ALLOWED.get(name, 0)}"
        for name, lines in found.items()
        if len(lines) > ALLOWED.get(name, 0)
    ]
    shown = [line for name, lines in found.items() if len(lines) > ALLOWED.get(name, 0) for line in lines]
    assert not more, "more findings than allowed (lower ALLOWED when a count falls):\n" + "\n".join([*more, *shown])


@pytest.mark.parametrize(
    "text",
    [
        "The cache is computed anew.",
        "The learner is told which\ntensors changed.",
        "`Sampled` of one token a row.",
        "That stands in the manifest.",
        "The run ends with a sentence.",
        "The numbers are held against the format.",
    ],
)
def test_a_bad_sentence_is_found(text):
    assert len(list(findings_in(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "One token per row, and one row per sample.",
        "The plan states the reason; the error says what to do.",
        'Use `anew` in code, or quote "nobody".',
        "Two engines can share one GPU; a step takes 2 s.",
        "The file is located under the run directory and it is not a checkpoint.",
        "```text\nnobody told me anew\n```",
    ],
)
def test_a_good_sentence_is_left_alone(text):
    assert list(findings_in(text)) == []


def test_names_docstrings_and_comments_of_code_are_read():
    code = '"""It is told anew."""\ndef kept(x):\n    """Keep."""\n    return x  # nobody reads it\nvalue = "anew"\n'
    assert sorted(line for line, _ in findings_in_code(code)) == [1, 1, 2, 4]


if __name__ == "__main__":
    wanted = sys.argv[1:]
    for name, paths in packages().items():
        if not wanted or name in wanted:
            lines = [line for path in paths for line in listed(path)]
            print("\n".join(lines) if wanted else f"{len(lines):5} {name}")
    if not wanted:
        print(f"{sum(len(listed(path)) for path in PAGES):5} pages")
    counts = Counter(line.split(": ")[1] for path in PAGES for line in listed(path))
    print("\n".join(f"{count:5} {words}" for words, count in counts.most_common(30)) if not wanted else "")
