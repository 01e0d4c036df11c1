"""The sink of ``--use-trackio``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from miles_core.plugin import MilesError
from miles_telemetry.contents import list_parameters, make_rows

if TYPE_CHECKING:
    from miles_core.data import Sample
    from miles_core.plugin import Run


class Trackio:
    """Sends metrics to a trackio run, whose name is that of the run directory, so that a resumed run continues it.

    Args:
        project: trackio project.
        name: name of the trackio run.
        config: the effective configuration.
        samples: samples per step and evaluation set.

    Raises:
        MilesError: trackio did not start the run.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, str], samples: int = 0) -> None:
        self._samples = samples
        try:
            import trackio

            self._trackio = trackio
            self._run = trackio.init(
                project=project,
                name=name,
                resume="allow",
                embed=False,
                config=dict(config),
            )
        except Exception as error:  # whatever the package raises: no connection, no permission
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise MilesError(
                f"--use-trackio: trackio did not start the run ({reason}); unset TRACKIO_SPACE_ID to keep the metrics on this machine"
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics."""
        self._trackio.log(dict(metrics), step=step)

    async def write_samples(self, kind: str, step: int, samples: Iterable[tuple[Sample, Any, str]]) -> None:
        """Send the first samples of a step as tables."""
        for name, rows in make_rows(samples, self._samples).items() if self._samples else ():
            table = self._trackio.Table(columns=[*rows[0]], data=[[*row.values()] for row in rows])
            title = "/".join(filter(None, ("samples", kind, name)))
            await asyncio.to_thread(self._trackio.log, {title: table}, step=step)

    def roll_back(self, step: int) -> None:
        """trackio keeps the samples of steps that are repeated."""

    def close(self) -> None:
        """Finish the trackio run."""
        self._trackio.finish()


def make_sink(run: Run) -> Trackio | None:
    """Make the sink of ``--use-trackio``."""
    options = run.config.telemetry
    if not options.use_trackio:
        return None
    return Trackio(
        options.trackio_project, run.directory.absolute().name, list_parameters(run), samples=options.samples
    )
