"""Writes the report of a run: the page of ``miles watch`` as one HTML file with its data inside, and the plots as PNG files.

It reads the files of a run directory (``metrics.jsonl``, ``plan.json``, ``config.yaml``, ``environment.json``, ``rollouts/``). Any of them may
be missing, and the run may have no or few steps, or still be running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_core.errors import MilesError
from miles_core.plugin.discovery import discover
from miles_tools.output_file import make_folder, write_file
from miles_tools.report.grids import draw_grid, find_grids
from miles_tools.report.mismatch_plots import draw_budget
from miles_tools.report.page import clean, gather, put_inside
from miles_tools.report.plots import draw, panels
from miles_tools.report.reading import RunReader, open_runs, options_of
from miles_tools.report.selection import select_samples

HTML, COMPARISON = "report.html", "compare.html"
IMAGES = "report"
#: Image of the mismatch budget; with several policies their names follow.
BUDGET = "budget"


def report(run_dir: Path | str) -> Path:
    """Write ``report.html`` and ``report/*.png`` into ``run_dir`` and return the HTML file's path.

    Raises MilesError when the directory is no run directory, or a file in it is not what a run wrote.
    """
    run = RunReader(Path(run_dir))
    run.refresh()
    _write_images(run.directory / IMAGES, _draw(run))
    return _write_page([run], run.directory / HTML)


def compare(directories: Sequence[Path | str], target: Path | str = COMPARISON) -> Path:
    """Write the page of at least two runs to ``target`` and return its path.

    Raises:
        MilesError: a directory is no run directory, occurs twice, or has no metrics yet; or there are more runs than colours.
    """
    runs = open_runs([Path(directory) for directory in directories])
    for run in runs:
        run.refresh()
        if not run.records:
            raise MilesError(f"{run.directory}: this run has not completed a step yet, so there is nothing to compare")
    return _write_page(runs, Path(target))


def _write_page(runs: Sequence[RunReader], target: Path) -> Path:
    problems: dict[int, str] = {}
    samples = []
    for number, run in enumerate(runs):
        found, damaged, files = select_samples(run, number, len(runs), options_of(run.config).get("reward.reward_key"))
        samples += found
        if damaged:
            problems[number] = f"{damaged} of {files} files with samples are damaged and left out."
        run.steps = {kind: sorted({s["step"] for s in found if s["kind"] == kind}) for kind in run.steps}
    write_file(target, put_inside(gather(runs, problems), clean(samples)))
    return target


def _draw(run: RunReader) -> dict[str, bytes]:
    """Draw the plots as PNG images, by name."""
    declared = [panel for plugin in discover().values() for panel in plugin.panels]
    chosen = panels(run.records, [panel for panel in declared if panel.kind != "grid"])
    images = {panel.name: draw_grid(panel, grid) for panel, grid in find_grids(run.directory, declared)}
    for policy, budget in run.budgets.items():
        images[f"{BUDGET}-{policy}" if len(run.budgets) > 1 else BUDGET] = draw_budget(budget)
    return {panel.name: draw(panel, run.records) for panel in chosen} | images


def _write_images(directory: Path, images: Mapping[str, bytes]) -> None:
    """Write every image into ``directory``, and remove earlier ones."""
    make_folder(directory)
    for name, png in images.items():
        write_file(directory / f"{name}.png", png)
    for old in directory.glob("*.png"):
        if old.stem not in images:
            old.unlink()
