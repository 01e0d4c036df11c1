"""The sink of ``--use-otel``: one trace per step.

The root span is the step, from the metrics of the previous step to its own, with the metrics as attributes. Its children are the intervals
that the run's clock reports: phases of the driver, calls of ranks and engines in other processes, requests to engines and tool calls.
Requests and tool calls of rollout workers in other processes are not among them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from miles_core.plugin import redact

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from miles_core.plugin import Run

log = logging.getLogger(__name__)

#: Spans of a step; further intervals are counted in the attribute ``miles.dropped``.
MOST = 20_000


class Traces:
    """Sends the intervals of each step as one trace.

    Args:
        run: name of the run, an attribute of every span.
        exporter: where finished spans go.
    """

    def __init__(self, run: str, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "miles", "miles.run": run})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=2 * MOST))
        self._tracer = self._provider.get_tracer("miles")
        self._lock = threading.Lock()
        self._intervals: list[tuple[str, float, float]] = []
        self._dropped = 0
        self._start = time.perf_counter()
        #: Nanoseconds since 1970 at the zero of ``time.perf_counter``.
        self._zero = time.time_ns() - int(self._start * 1e9)

    def observe(self, name: str, start: float, end: float) -> None:
        """Add an interval to the current step; see ``Clock.observe``."""
        with self._lock:
            if len(self._intervals) < MOST:
                self._intervals.append((name, start, end))
            else:
                self._dropped += 1

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """End the step: make its spans. A record of the same step without ``time/step``, such as an evaluation's, ends nothing."""
        if "time/step" not in metrics:
            return
        with self._lock:
            intervals, dropped, self._intervals, self._dropped = self._intervals, self._dropped, [], 0
        from opentelemetry.trace import set_span_in_context

        end = time.perf_counter()
        attributes = {"miles.step": step, "miles.dropped": dropped, **metrics}
        first = min([self._start, *(start for _, start, _ in intervals)])
        root = self._tracer.start_span(f"step {step}", start_time=self._nanoseconds(first), attributes=attributes)
        within = set_span_in_context(root)
        for name, start, stop in intervals:
            span = self._tracer.start_span(redact(name), within, start_time=self._nanoseconds(start))
            span.end(self._nanoseconds(stop))
        root.end(self._nanoseconds(end))
        self._start = end

    def close(self) -> None:
        """Send the remaining spans, for at most ten seconds."""
        if not self._provider.force_flush(10_000):
            log.warning("--use-otel: the last spans were not delivered within 10 s")
        self._provider.shutdown()

    def _nanoseconds(self, seconds: float) -> int:
        return self._zero + int(seconds * 1e9)


def make_sink(run: Run) -> Traces | None:
    """Make the sink of ``--use-otel``."""
    if not run.config.telemetry.use_otel:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    traces = Traces(run.directory.absolute().name, OTLPSpanExporter())
    run.clock.observe(traces.observe)
    return traces
