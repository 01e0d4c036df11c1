"""Lets a benchmark run code of its own inside SGLang's processes, which call it through the entry point ``sglang.srt.plugins``."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.measure import ROOT


def register(directory: Path, module: str) -> None:
    """Write an entry point for ``module``'s function ``install`` into ``directory``, and put it on the import path of the processes that this
    one starts."""
    folder = directory / "miles_benchmark-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: miles-benchmark\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nmiles_benchmark = {module}:install\n")
    paths = [str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
