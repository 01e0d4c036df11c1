"""How many files and functions of this repository one training step runs through.

A toy run in one process, plain BF16 and no plugin; ``sys.setprofile`` notes every function of ``miles_core`` and ``miles_embedded`` that is
called between the second step's beginning and its end (rollout, reward, training, sync, metrics). Counts, so one run is exact.

    python benchmarks/project/step_files.py
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.measure import finish, installed, options

ROOT = Path(__file__).parents[2]


def is_ours(frame: FrameType) -> bool:
    """Whether the code of ``frame`` is in this repository."""
    file = frame.f_code.co_filename
    return file.startswith(str(ROOT)) and ".venv" not in file


def main() -> None:
    given = options(__doc__).parse_args()
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
    found = {"files": len(files), "functions": len(functions), "depth": depth}
    finish("step_files", {**found, "names": files}, given.save, lambda: installed("torch", "miles-core"))


if __name__ == "__main__":
    main()
