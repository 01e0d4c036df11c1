"""Draws the plots of a report in several processes: one takes about a tenth of a second of one processor, and a report has 20 to 60.

The processes run this module and receive panels and records through their standard input. They do not import the caller's main module, so a
script may write a report without a guard around its statements.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from miles_core.errors import MilesError
from miles_core.plugin.panel import Panel
from miles_tools.report.plots import Records, draw

#: A process has to draw at least this many plots: it first imports matplotlib.
FEW = 3
#: Maximum number of processes.
MOST = 12


def draw_all(chosen: Sequence[Panel], records: Records, processes: int | None = None) -> dict[str, bytes]:
    """Draw panels as PNG images.

    Args:
        chosen: the panels.
        records: the metrics of a run.
        processes: how many processes draw; by default as many as there are processors, and at least ``FEW`` plots for each.

    Returns:
        Panel name -> image, in the order of the panels.

    Raises:
        MilesError: a process ended with an error.
    """
    if processes is None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        processes = min(processors, len(chosen) // FEW, MOST)
    if processes < 2:
        return {panel.name: draw(panel, records) for panel in chosen}
    with ThreadPoolExecutor(processes) as threads:
        parts = list(threads.map(lambda part: _draw_elsewhere(part, records), _deal(chosen, processes)))
    images = {name: image for part in parts for name, image in part.items()}
    return {panel.name: images[panel.name] for panel in chosen}


def _deal(chosen: Sequence[Panel], count: int) -> list[Sequence[Panel]]:
    """Divide the panels by turns."""
    return [chosen[start::count] for start in range(count)]


def _draw_elsewhere(chosen: Sequence[Panel], records: Records) -> dict[str, bytes]:
    """Draw panels in a new process."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((chosen, records)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    if done.returncode:
        raise MilesError(f"drawing {', '.join(panel.name for panel in chosen)} failed (exit code {done.returncode})")
    images: dict[str, bytes] = pickle.loads(done.stdout)
    return images


def main() -> None:
    """Read panels and records from standard input, and write the images to standard output."""
    chosen, records = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(pickle.dumps({panel.name: draw(panel, records) for panel in chosen}))


if __name__ == "__main__":
    main()
