"""Results that pages for users name: each is there, and the script that writes it is, too."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "plugins/*/README.md", "recipes/**/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)
#: ``startup-2026-11-29.json``, ``optimizers-2026-11-24-*.json``
RESULT = re.compile(r"\b((\w+)-20\d\d-\d\d-\d\d[\w-]*)(\.json)?")


def find_names():
    """Yield the names under which scripts save results: the script's own, or the first argument of ``finish``."""
    for script in BENCHMARKS.glob("*/*.py"):
        yield script.stem
        yield from re.findall(r'\bfinish\(\s*"(\w+)"', script.read_text(encoding="utf-8"))


WRITTEN = set(find_names())


def find_errors(text):
    """Yield what is wrong with the results that a text names."""
    for result, name, ending in RESULT.findall(text):
        if name not in WRITTEN:
            yield f"{result}: no script in benchmarks writes {name}"
        elif ending and not (BENCHMARKS / "results" / f"{result}.json").is_file():
            yield f"{result}.json does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_results_that_a_page_names_have_scripts(page):
    assert list(find_errors(page.read_text(encoding="utf-8"))) == []


def test_a_result_without_a_script_or_without_its_file_is_found():
    text = "[a](../benchmarks/results/nothing-2026-11-22.json) `startup-2000-01-01.json` `optimizers-2026-11-24-*.json`"
    assert list(find_errors(text)) == [
        "nothing-2026-11-22: no script in benchmarks writes nothing",
        "startup-2000-01-01.json does not exist",
    ]
    assert {"driver_bytes", "fp8_product_tiles"} <= WRITTEN
