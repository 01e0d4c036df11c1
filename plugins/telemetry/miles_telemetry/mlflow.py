"""The sink of ``--use-mlflow``."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.plugin import MilesError, redact
from miles_telemetry.contents import list_parameters, make_rows

if TYPE_CHECKING:
    from miles_core.data import Sample
    from miles_core.plugin import Run

log = logging.getLogger(__name__)

#: File of the run directory with the id of the MLflow run, which a resumed run continues.
RUN_ID = "mlflow_run_id"
#: Longest value of a parameter that MLflow accepts, in characters.
LONGEST = 6000


class MLflow:
    """Sends metrics to an MLflow run.

    Args:
        experiment: MLflow experiment, created if missing.
        directory: the run directory.
        config: the effective configuration.
        samples: samples per step and evaluation set, stored as JSON artifacts.

    Raises:
        MilesError: the tracking server did not start the run.
    """

    def __init__(self, experiment: str, directory: Path, config: Mapping[str, str], samples: int = 0) -> None:
        self._samples = samples
        file = directory / RUN_ID
        known = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        try:
            from mlflow import MlflowClient

            self._client = MlflowClient()
            if not known:
                found = self._client.get_experiment_by_name(experiment)
                number = found.experiment_id if found else self._client.create_experiment(experiment)
                known = self._client.create_run(number, run_name=directory.absolute().name).info.run_id
                for key, value in config.items():
                    self._client.log_param(known, key, value[:LONGEST])
            self._client.update_run(known, status="RUNNING")
        except Exception as error:  # whatever the package raises: no connection, no permission
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            server = redact(os.environ.get("MLFLOW_TRACKING_URI", "not set"))
            raise MilesError(
                f"--use-mlflow: no run was started ({reason}); MLFLOW_TRACKING_URI is {server}: set it to a server, or to "
                "sqlite:///FILE.db with the package mlflow"
            ) from error
        self._run = known
        file.write_text(f"{known}\n", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics in one request."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = [Metric(name, float(value), now, step) for name, value in metrics.items()]
        self._attempt(f"the metrics of step {step}", self._client.log_batch, self._run, found)

    async def write_samples(self, kind: str, step: int, samples: Iterable[tuple[Sample, Any, str]]) -> None:
        """Store the first samples of a step as ``samples/KIND_STEP.json``."""
        if self._samples and (sets := make_rows(samples, self._samples)):
            file = f"samples/{kind}_{step}.json"
            await asyncio.to_thread(self._attempt, file, self._client.log_dict, self._run, sets, file)

    def roll_back(self, step: int) -> None:
        """The samples of steps that are repeated are replaced."""

    def end(self, step: int, why: str) -> None:
        """Record how the run ended."""
        status = "FINISHED" if why == "finished" else "KILLED" if why.startswith("stopped") else "FAILED"
        self._attempt("the reason of the end", self._client.set_tag, self._run, "miles.ending", why)
        self._attempt("the status", self._client.set_terminated, self._run, status)

    def _attempt(self, what: str, send: Callable[..., Any], *arguments: Any) -> None:
        """Send something; a run does not end because a server is away."""
        try:
            send(*arguments)
        except Exception as error:  # whatever the package raises
            log.warning("MLflow did not receive %s (%s: %s)", what, type(error).__name__, error)

    def close(self) -> None:
        """``end``, which follows, finishes the MLflow run."""


def make_sink(run: Run) -> MLflow | None:
    """Make the sink of ``--use-mlflow``."""
    options = run.config.telemetry
    if not options.use_mlflow:
        return None
    sink = MLflow(options.mlflow_experiment, run.directory, list_parameters(run), options.samples)
    run.at_end.append(sink.end)
    return sink
