"""Plots that several processes draw are those that one draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_core.errors import MilesError
from miles_core.plugin.panel import Panel
from miles_tools.report import drawing
from miles_tools.report.drawing import draw_all

RECORDS = [{"step": step, "a": step * 0.5, "b": 2.0 - step} for step in range(1, 6)]
PANELS = [Panel(name, name.upper(), {name: name}) for name in ("a", "b")] + [Panel("c", "C", {"a": "x", "b": "y"})]


def test_processes_draw_the_same_images_in_the_same_order() -> None:
    one, two = draw_all(PANELS, RECORDS, processes=1), draw_all(PANELS, RECORDS, processes=2)
    assert list(one) == list(two) == ["a", "b", "c"] and one == two and len(set(one.values())) == 3


def test_few_plots_are_drawn_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "_draw_elsewhere", lambda *_: pytest.fail("a process was started"))
    assert list(draw_all(PANELS[:1], RECORDS)) == ["a"]


def test_a_script_without_a_guard_can_draw(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from miles_core.plugin.panel import Panel\n"
        "from miles_tools.report.drawing import draw_all\n"
        "panels = [Panel(str(n), 'x', {'a': 'a'}) for n in range(2)]\n"
        "print(list(draw_all(panels, [{'step': 1, 'a': 1.0}], processes=2)))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "['0', '1']\n"


def test_a_process_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(MilesError, match=r"drawing a, c failed \(exit code 1\)"):
        draw_all(PANELS, RECORDS, processes=2)
