"""Metrics, samples and traces of a run in trackio, MLflow, Prometheus and OpenTelemetry, for miles-core."""

from miles_core.plugin import Package, Plugin
from miles_telemetry.config import TelemetryConfig

__version__ = "0.1.0"

_INSTALL = "pip install 'miles-plugin-telemetry[{}]'"

plugin = Plugin(
    name="telemetry",
    summary="metrics and samples in trackio, MLflow and Prometheus, and traces of each step in OpenTelemetry",
    version=__version__,
    core="~=0.1",
    config=TelemetryConfig,
    packages=(
        Package("trackio", ">=0.20", when="telemetry.use_trackio", install=_INSTALL.format("trackio")),
        Package("mlflow-skinny", ">=3", when="telemetry.use_mlflow", install=_INSTALL.format("mlflow")),
        Package("opentelemetry-sdk", ">=1.30", when="telemetry.use_otel", install=_INSTALL.format("otel")),
        Package(
            "opentelemetry-exporter-otlp-proto-http",
            ">=1.30",
            when="telemetry.use_otel",
            install=_INSTALL.format("otel"),
        ),
    ),
    provides={
        "sink": {
            "trackio": "miles_telemetry.trackio:make_sink",
            "mlflow": "miles_telemetry.mlflow:make_sink",
            "prometheus": "miles_telemetry.prometheus:make_sink",
            "otel": "miles_telemetry.otel:make_sink",
        }
    },
)
