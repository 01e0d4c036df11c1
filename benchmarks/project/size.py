"""Size of this repository: lines of code of each package, and the files and functions that one training step runs through.

Lines are counted without comments, docstrings and empty lines, of two checkouts with ``--before``. The step is the second one of a toy run in one
process, plain BF16 and no plugin; ``sys.setprofile`` notes every function of ``miles_core`` and ``miles_embedded`` that is called between its
beginning and its end (rollout, reward, training, sync, metrics). Counts, so one run is exact.

    python benchmarks/project/size.py --before CHECKOUT --save
"""

from __future__ import annotations

import argparse
import ast
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

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


def is_ours(frame: FrameType) -> bool:
    """Whether the code of ``frame`` is in this repository."""
    file = frame.f_code.co_filename
    return file.startswith(str(ROOT)) and ".venv" not in file


def count_step() -> dict[str, Any]:
    """Run two toy steps, and count the files, the functions and the depth of calls of the second."""
    from miles_core import loop
    from miles_testing import toy_run

    functions: Counter[tuple[str, str]] = Counter()
    depth = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal depth
        if event == "call" and is_ours(frame):
            functions[frame.f_code.co_filename, frame.f_code.co_qualname] += 1
            own, outer = 0, frame
            while outer is not None:
                own += is_ours(outer)
                outer = outer.f_back  # type: ignore[assignment]
            depth = max(depth, own)

    plain = loop.step

    async def step(run: Any, *rest: Any) -> None:
        if run.step != 1:
            await plain(run, *rest)
            return
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            await plain(run, *rest)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    loop.step = step
    toy_run(steps=2)
    files = sorted({str(Path(file).relative_to(ROOT)) for file, _ in functions if file != __file__})
    return {"files": len(files), "functions": len(functions), "depth": depth, "names": files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="an earlier checkout, to compare the lines with"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME-DATE.json")
    given = parser.parse_args()
    result: dict[str, object] = {"lines": count_packages(ROOT)}
    if given.before is not None:
        result |= {"before": {"commit": commit(given.before), "lines": count_packages(given.before)}}
    finish("size", {**result, "step": count_step()}, given.save, lambda: installed("torch", "miles-core"))


if __name__ == "__main__":
    main()
