"""Options of the telemetry plugin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class TelemetryConfig:
    """Metrics and samples for trackio, MLflow and Prometheus, and traces for OpenTelemetry."""

    use_trackio: bool = option(
        False,
        flag="--use-trackio",
        help="also send metrics to trackio; TRACKIO_SPACE_ID selects a Space, else they stay on this machine",
        enables=True,
    )
    trackio_project: str = option(
        "miles", flag="--trackio-project", help="trackio project", metavar="NAME", only_if="telemetry.use_trackio"
    )
    use_mlflow: bool = option(
        False, flag="--use-mlflow", help="also send metrics to MLflow (MLFLOW_TRACKING_URI)", enables=True
    )
    mlflow_experiment: str = option(
        "miles", flag="--mlflow-experiment", help="MLflow experiment", metavar="NAME", only_if="telemetry.use_mlflow"
    )
    samples: int = option(
        0,
        flag="--telemetry-samples",
        help="samples of each step, and of each evaluation set, to send to trackio and MLflow",
        metavar="N",
        ge=0,
        le=1000,
    )
    prometheus_port: int | None = option(
        None,
        flag="--prometheus-port",
        help="serve the latest metrics as text at /metrics of this port",
        metavar="PORT",
        ge=1,
        le=65535,
        enables=True,
    )
    prometheus_host: str = option(
        "127.0.0.1", flag="--prometheus-host", help="address that the server of --prometheus-port listens on"
    )
    prometheus_file: Path | None = option(
        None,
        flag="--prometheus-file",
        help="write the latest metrics as text, for the textfile collector of the node exporter",
        metavar="FILE.prom",
        enables=True,
    )
    use_otel: bool = option(
        False,
        flag="--use-otel",
        help="send a trace of each step by OTLP over HTTP (OTEL_EXPORTER_OTLP_ENDPOINT): phases, calls of workers, requests to "
        "engines, tool calls",
        enables=True,
    )
