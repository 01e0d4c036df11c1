"""Lines of code of each package, without comments, docstrings and empty lines; of two checkouts with ``--before``.

python benchmarks/project/code_lines.py --before CHECKOUT --save
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from benchmarks.measure import ROOT, commit, finish, installed

DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def count_file(path: Path) -> int:
    """Count the lines of a Python file that are code."""
    source = path.read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(1 for i, line in lines if line.strip() and i not in docstrings and not line.strip().startswith("#"))


def count_packages(root: Path) -> dict[str, int]:
    """Count the lines of every package of a checkout: those of core's wheel, and those of plugins under ``plugins``."""
    packages = {p: sorted((root / p).rglob("*.py")) for p in sorted(x.name for x in root.glob("miles_*") if x.is_dir())}
    packages["plugins"] = sorted(root.glob("plugins/*/miles_*/**/*.py"))
    return {name: sum(map(count_file, files)) for name, files in packages.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an earlier checkout, to compare with")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME-DATE.json")
    given = parser.parse_args()
    result: dict[str, object] = {"lines": count_packages(ROOT)}
    if given.before is not None:
        result |= {"before": {"commit": commit(given.before), "lines": count_packages(given.before)}}
    finish("code_lines", result, given.save, lambda: installed("miles-core"))


if __name__ == "__main__":
    main()
