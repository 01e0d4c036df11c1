"""Sinks: what reaches each program. trackio, MLflow and OpenTelemetry are doubles with the calls of their packages that the sinks use."""

import asyncio
import json
import socket
import sys
import types
import urllib.request
from urllib.error import HTTPError, URLError

import pytest

from miles_core.plugin import ConfigError, MilesError, PlanError
from miles_telemetry import contents, mlflow, otel, trackio
from miles_telemetry.config import TelemetryConfig
from miles_telemetry.mlflow import RUN_ID, MLflow
from miles_telemetry.otel import Traces
from miles_telemetry.prometheus import Prometheus, render
from miles_telemetry.trackio import Trackio


def sample(text, reward=0.5, prompt="p"):
    return types.SimpleNamespace(prompt=prompt, response=text, label=None, reward=reward, response_length=3)


def test_rows_are_the_first_samples_of_each_set_without_credentials():
    samples = [
        (sample("one"), None, "math"),
        (sample("two"), None, "math"),
        (sample("api_key=sk-abcdefghijklmnop1234"), None, "code"),
    ]
    sets = contents.make_rows(iter(samples), 1)
    assert [row["response"] for row in sets["math"]] == ["one"]
    assert "sk-abcdef" not in sets["code"][0]["response"]


def test_trackio_receives_metrics_and_tables_and_is_finished(monkeypatch):
    calls = []
    double = types.SimpleNamespace(
        init=lambda **kwargs: calls.append(kwargs),
        log=lambda metrics, step: calls.append((metrics, step)),
        finish=lambda: calls.append("finished"),
        Table=lambda columns, data: (columns, data),
    )
    monkeypatch.setitem(sys.modules, "trackio", double)
    sink = Trackio("mine", "run-1", {"lr": "0.1"}, samples=1)
    assert calls[0]["project"] == "mine" and calls[0]["resume"] == "allow" and calls[0]["config"] == {"lr": "0.1"}
    sink.write(2, {"a": 1.0})
    asyncio.run(sink.write_samples("train", 2, [(sample("x"), None, ""), (sample("y"), None, "")]))
    sink.close()
    assert calls[1] == ({"a": 1.0}, 2) and calls[-1] == "finished"
    ((title, (columns, data)),) = calls[2][0].items()
    assert title == "samples/train" and data == [["p", "x", "None", "0.5", 3]] and columns[0] == "prompt"


def test_a_service_that_does_not_start_the_run_is_one_line(monkeypatch):
    def init(**kwargs):
        raise RuntimeError("no\nconnection")

    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=init))
    with pytest.raises(
        MilesError, match=r"--use-trackio: trackio did not start the run \(RuntimeError: no connection\)"
    ):
        Trackio("mine", "run-1", {})


class Client:
    """The calls of ``mlflow.MlflowClient`` that the sink uses."""

    def __init__(self):
        self.calls, self.broken = [], False

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return f"experiment of {name}"

    def create_run(self, experiment, run_name):
        self.calls.append((experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="a1"))

    def __getattr__(self, name):
        def call(*arguments, **named):
            if self.broken:
                raise ConnectionError("the server is away")
            self.calls.append((name, *arguments, *named.values()))

        return call


@pytest.fixture
def client(monkeypatch):
    made = Client()
    entities = types.SimpleNamespace(Metric=lambda key, value, timestamp, step: (key, value, step))
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=lambda: made, entities=entities))
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return made


def test_mlflow_receives_metrics_samples_and_the_ending_and_a_resumed_run_continues(tmp_path, client):
    sink = MLflow("mine", tmp_path, {"lr": "0.1"}, samples=1)
    assert client.calls[0] == ("experiment of mine", tmp_path.name)
    assert ("log_param", "a1", "lr", "0.1") in client.calls
    sink.write(3, {"a": 1})
    asyncio.run(sink.write_samples("eval", 3, [(sample("x"), None, "math")]))
    sink.end(4, "stopped by SIGTERM")
    assert ("log_batch", "a1", [("a", 1.0, 3)]) in client.calls
    _, _, sets, file = next(call for call in client.calls if call[0] == "log_dict")
    assert sets["math"][0]["response"] == "x" and file == "samples/eval_3.json"
    assert client.calls[-1] == ("set_terminated", "a1", "KILLED")
    assert (tmp_path / RUN_ID).read_text() == "a1\n"
    client.calls.clear()
    MLflow("mine", tmp_path, {"lr": "0.2"})
    assert client.calls == [("update_run", "a1", "RUNNING")]


def test_a_server_that_goes_away_does_not_end_the_run(tmp_path, client, caplog):
    sink = MLflow("mine", tmp_path, {})
    client.broken = True
    sink.write(3, {"a": 1.0})
    sink.end(3, "finished")
    assert "MLflow did not receive the metrics of step 3 (ConnectionError: the server is away)" in caplog.text


def run_with(tmp_path, **options):
    config = types.SimpleNamespace(telemetry=TelemetryConfig(**options), args=types.SimpleNamespace(lr=0.1))
    return types.SimpleNamespace(config=config, directory=tmp_path, at_end=[])


def test_use_mlflow_makes_a_run_in_its_experiment_that_the_end_of_the_run_ends(tmp_path, client):
    assert mlflow.make_sink(run_with(tmp_path)) is None and client.calls == []
    run = run_with(tmp_path, use_mlflow=True, mlflow_experiment="mine")
    sink = mlflow.make_sink(run)
    assert client.calls[0] == ("experiment of mine", tmp_path.name) and run.at_end == [sink.end]


def test_trackio_project_names_the_project(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "trackio", types.SimpleNamespace(init=lambda **named: calls.append(named)))
    assert trackio.make_sink(run_with(tmp_path)) is None and calls == []
    trackio.make_sink(run_with(tmp_path, use_trackio=True, trackio_project="mine"))
    assert calls[0]["project"] == "mine"


def test_the_text_for_prometheus():
    text = render({"train/grad_norm": 0.5, "train.grad norm": 9.0}, 7, 'my "run"')
    assert text.splitlines()[:2] == ["# TYPE miles_step gauge", 'miles_step{run="my \\"run\\""} 7']
    # the second name is the same after replacing its characters
    assert 'miles_train_grad_norm{run="my \\"run\\""} 0.5' in text and "9.0" not in text


def test_prometheus_reads_the_latest_values_on_loopback_and_from_a_file(tmp_path):
    file = tmp_path / "miles.prom"
    sink = Prometheus("run", "127.0.0.1", 0, file)
    assert sink.address.startswith("http://127.0.0.1:")
    sink.write(1, {"a": 1.0, "b": 2.0})
    sink.write(2, {"a": 3.0})
    with urllib.request.urlopen(sink.address, timeout=5) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = reply.read().decode()
    assert 'miles_a{run="run"} 3.0' in text and 'miles_b{run="run"} 2.0' in text and file.read_text() == text
    with pytest.raises(HTTPError, match="404"):
        urllib.request.urlopen(sink.address.replace("/metrics", "/other"), timeout=5)
    port = int(sink.address.split(":")[2].partition("/")[0])
    with pytest.raises(ConfigError, match=f"--prometheus-port {port}: .* cannot be opened .*choose another port"):
        Prometheus("run", "127.0.0.1", port, None)
    sink.close()
    with pytest.raises(ConfigError, match="there is no directory"):
        Prometheus("run", "127.0.0.1", None, tmp_path / "none" / "a.prom")


class Span:
    def __init__(self, name, parent, start, attributes):
        self.name, self.parent, self.start, self.attributes, self.finish = name, parent, start, attributes or {}, None

    def end(self, time):
        self.finish = time


@pytest.fixture
def spans(monkeypatch):
    """Doubles of the packages of OpenTelemetry; returns the list of spans."""
    made = []

    def start_span(name, context=None, start_time=None, attributes=None):
        made.append(Span(name, context, start_time, attributes))
        return made[-1]

    class Provider:
        def __init__(self, resource, shutdown_on_exit):
            self.resource = resource

        def add_span_processor(self, processor):
            pass

        def get_tracer(self, name):
            return types.SimpleNamespace(start_span=start_span)

        def force_flush(self, milliseconds):
            return True

        def shutdown(self):
            pass

    modules = {
        "opentelemetry": {},
        "opentelemetry.sdk": {},
        "opentelemetry.sdk.resources": {"Resource": types.SimpleNamespace(create=dict)},
        "opentelemetry.sdk.trace": {"TracerProvider": Provider},
        "opentelemetry.sdk.trace.export": {"BatchSpanProcessor": lambda exporter, max_queue_size: exporter},
        "opentelemetry.trace": {"set_span_in_context": lambda span: span},
    }
    for name, values in modules.items():
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**values))
    return made


def test_a_trace_has_phases_and_requests_below_the_step(spans):
    traces = Traces("run", None)
    begin = traces._start
    traces.observe("rollout", begin, begin + 1.0)
    traces.observe("engine request", begin + 0.1, begin + 0.5)
    traces.write(1, {"eval/mean": 0.5})  # no step
    assert spans == []
    traces.write(1, {"time/step": 1.0, "reward/mean": 0.5})
    root, phase, request = spans
    assert root.name == "step 1" and root.attributes["reward/mean"] == 0.5 and root.parent is None
    assert phase.parent is root and request.parent is root
    assert request.finish - request.start == pytest.approx(0.4e9, rel=1e-3)
    traces.write(2, {"time/step": 1.0})
    assert [span.name for span in spans[3:]] == ["step 2"]
    traces.close()


def test_use_otel_observes_the_clock_of_the_run(tmp_path, spans, monkeypatch):
    assert otel.make_sink(run_with(tmp_path)) is None
    exporter = types.SimpleNamespace(OTLPSpanExporter=object)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", exporter)
    observers = []
    run = run_with(tmp_path, use_otel=True)
    run.clock = types.SimpleNamespace(observe=observers.append)
    traces = otel.make_sink(run)
    assert observers == [traces.observe]
    traces.close()


def test_a_run_with_prometheus_and_intervals_of_its_clock(toy_run, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(Prometheus, "close", lambda self: seen.append(self.text))
    run = toy_run(["telemetry"], steps=1, prometheus_file=tmp_path / "a.prom")
    assert "miles_step" in seen[0] and "miles_reward_mean" in (tmp_path / "a.prom").read_text()
    assert run.run.plan.order[0] == "telemetry"


def test_a_run_serves_its_metrics_at_the_address_of_the_option(toy_run, tmp_path, monkeypatch):
    read = []

    def close(self, plain=Prometheus.close):
        with urllib.request.urlopen(self.address, timeout=5) as reply:
            read.append((self.address, reply.read().decode()))
        with pytest.raises(URLError):
            urllib.request.urlopen(self.address.replace("127.0.0.2", "127.0.0.1"), timeout=5)
        plain(self)

    monkeypatch.setattr(Prometheus, "close", close)
    with socket.socket() as other:  # bound, so that no other test listens there
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        toy_run(["telemetry"], steps=1, prometheus_port=port, prometheus_host="127.0.0.2")
    ((address, text),) = read
    assert address == f"http://127.0.0.2:{port}/metrics" and "miles_reward_mean" in text


def test_a_flag_activates_the_plugin_and_names_a_missing_package(plan):
    assert "telemetry" in plan(prometheus_port=9464).order
    with pytest.raises(PlanError, match=r"pip install 'miles-plugin-telemetry\[trackio\]'"):
        plan(use_trackio=True)


def test_rows_are_json():
    assert json.dumps(contents.make_rows([(sample("x", reward={"a": 1}), None, "")], 5))
