"""The doubles in this directory can be imported by its tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import miles_sglang
from miles_sglang import build

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def sglang_with(monkeypatch: Any) -> Callable[[Callable[[Path], Any]], list[Any]]:
    """Runs start, instead of SGLang, a double with the model that is made here. The call returns a list of the links of these runs."""
    from sglang_double import stand_in_for_sglang
    from sglang_scheduler_double import SchedulerLink

    stand_in_for_sglang(monkeypatch)
    monkeypatch.setattr(miles_sglang, "plugin", replace(miles_sglang.plugin, packages=()))

    def use(make: Callable[[Path], Any]) -> list[Any]:
        links: list[Any] = []

        def link(arguments: Any, *_: Any, **__: Any) -> SchedulerLink:
            links.append(SchedulerLink(make, Path(arguments["model_path"]), arguments))
            return links[-1]

        monkeypatch.setattr(build, "ProcessLink", link)
        return links

    return use


@pytest.fixture
def quantized_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give SGLang layers of a number format, also on a CPU."""

    def install(format: str) -> None:
        import torch

        if torch.cuda.is_available():
            return
        module = f"{format}_on_cpu"
        described = tmp_path / "plugins" / f"{module}-0.1.0.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1.0\n")
        (described / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{module} = {module}:install\n")
        paths = [str(described.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))

    return install
