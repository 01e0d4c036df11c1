"""The sinks of ``--prometheus-port`` and ``--prometheus-file``: the latest metrics in Prometheus' text format, version 0.0.4.

Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.plugin import ConfigError

if TYPE_CHECKING:
    from miles_core.plugin import Run

log = logging.getLogger(__name__)


def render(metrics: Mapping[str, float], step: int, run: str) -> str:
    """Return metrics as text. Characters that names cannot contain become ``_``; of two equal names the first is kept."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    found: dict[str, float] = {"miles_step": step}
    for name, value in metrics.items():
        found.setdefault("miles_" + re.sub(r"[^a-zA-Z0-9_:]", "_", name), value)
    lines = (f'# TYPE {name} gauge\n{name}{{run="{label}"}} {value!r}\n' for name, value in found.items())
    return "".join(lines)


class Prometheus:
    """Shows the latest value of every metric, also of those that the last step did not report.

    Args:
        run: value of the label ``run``.
        host, port: address of the server; no server if the port is None.
        file: file that is replaced at every step; None for no file.

    Raises:
        ConfigError: the address is in use, or the directory of the file does not exist.
    """

    def __init__(self, run: str, host: str, port: int | None, file: Path | None) -> None:
        self._run, self._file, self._server = run, file, None
        self._metrics: dict[str, float] = {}
        self.text = ""
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"--prometheus-file {file}: there is no directory {file.parent}")
        if port is not None:
            try:
                self._server = ThreadingHTTPServer((host, port), _handler_of(self))
            except OSError as error:
                raise ConfigError(
                    f"--prometheus-port {port}: {host}:{port} cannot be opened ({error.strerror}); choose another port"
                ) from error
            self.address = f"http://{host}:{self._server.server_address[1]}/metrics"
            threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
            log.info("metrics for Prometheus: %s", self.address)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the values of these metrics."""
        self._metrics |= metrics
        self.text = render(self._metrics, step, self._run)
        if self._file is None:
            return
        partial = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            partial.write_text(self.text, encoding="utf-8")
            os.replace(partial, self._file)
        except OSError as error:
            log.warning("--prometheus-file %s is not written: %s", self._file, error.strerror)

    def close(self) -> None:
        """Stop the server; the file keeps the last values."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _handler_of(sink: Prometheus) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            known = self.path.partition("?")[0] == "/metrics"
            body = sink.text.encode() if known else b"the metrics are at /metrics\n"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not logged."""

    return Handler


def make_sink(run: Run) -> Prometheus | None:
    """Make the sink of ``--prometheus-port`` and ``--prometheus-file``."""
    options = run.config.telemetry
    if options.prometheus_port is None and options.prometheus_file is None:
        return None
    name = run.directory.absolute().name
    return Prometheus(name, options.prometheus_host, options.prometheus_port, options.prometheus_file)
