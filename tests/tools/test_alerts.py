"""Alerts: what is sent, to whom, and that a run is not disturbed by them."""

import json
import logging
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from miles_core.errors import ConfigError, MilesError
from miles_testing import toy_run
from miles_tools import alerts
from miles_tools.alerts import Alerts, check_command, webhook_address

SCRIPT = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"


@pytest.fixture
def command(tmp_path):
    """A command line that appends its input to ``received``."""
    script = tmp_path / "receive.py"
    script.write_text(SCRIPT)
    return f"{sys.executable} {script} {tmp_path / 'received'}"


def received(tmp_path):
    return [json.loads(line) for line in (tmp_path / "received").read_text().splitlines()]


@pytest.fixture
def service():
    """A webhook; returns its address and the bodies that it received."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if len(bodies) == 1 else 500)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/hook", bodies
    server.shutdown()
    server.server_close()


def test_hints_and_a_stop_reach_a_command_and_a_webhook_without_credentials(tmp_path, command, service, caplog):
    address, bodies = service
    sink = Alerts("run-1", command, address)
    sink.write(1, {"a": 1.0})
    sink.write_hint(3, "step 3: the reward service at https://host/?api_key=abcdefgh12345678 is slow")
    sink.close()
    sink.end(3, "stopped by SIGTERM")
    first, second = received(tmp_path)
    assert (first["kind"], first["run"], first["step"]) == ("hint", "run-1", 3)
    assert first["text"].startswith("run-1: step 3: the reward service") and "abcdefgh" not in first["text"]
    assert (second["kind"], second["text"]) == ("stopped", "run-1: stopped by SIGTERM")
    assert bodies == [first, second]
    assert "an alert was not delivered: --alert-webhook: the service answered 500" in caplog.text


def test_a_run_that_finished_sends_nothing(tmp_path, command):
    Alerts("run-1", command).end(3, "finished")
    assert not (tmp_path / "received").exists()


def test_a_command_that_hangs_is_ended_and_never_delays_a_hint(monkeypatch, caplog):
    monkeypatch.setattr(alerts, "TIMEOUT", 0.2)
    monkeypatch.setattr(alerts, "MOST", 2)
    sink = Alerts("run-1", f"{sys.executable} -c 'import time; time.sleep(60)'")
    start = time.monotonic()
    for step in range(5):
        sink.write_hint(step, "a hint")
    assert time.monotonic() - start < 0.2
    sink.end(5, "stopped by SIGINT")
    assert time.monotonic() - start < 5
    assert "an alert is dropped, because 2 others wait" in caplog.text


def test_a_run_that_fails_sends_its_error_and_a_broken_function_at_the_end_is_logged(tmp_path, command, caplog):
    (tmp_path / "reward.py").write_text("async def reward(args, sample):\n    raise RuntimeError('no such judge')\n")
    with pytest.raises(MilesError, match="no such judge"):
        toy_run(steps=1, alert_command=command, custom_rm_path=tmp_path / "reward.py", directory=tmp_path / "run-7")
    (alert,) = received(tmp_path)
    assert alert["kind"] == "stopped" and alert["run"] == "run-7" and "no such judge" in alert["text"]


def test_an_error_of_a_function_at_the_end_is_logged(tmp_path, caplog, monkeypatch):
    from miles_core.run.ending import record_ending

    done = toy_run(steps=1).run
    done.at_end = [lambda step, why: 1 / 0]
    with caplog.at_level(logging.WARNING, "miles_core"):
        assert record_ending(done, "finished").why == "finished"
    assert "at the end of the run: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alert_command": "no-such-program --now"}, "there is no program 'no-such-program'"),
        ({"alert_command": "say 'hello"}, "close the quotation"),
        ({"alert_webhook": "ftp://host"}, "--alert-webhook ftp://host: the address must start with http"),
        ({"alert_webhook": "$MILES_NO_HOOK"}, r"--alert-webhook \$MILES_NO_HOOK: the environment variable is not set"),
    ],
)
def test_a_mistake_is_reported_before_the_run(options, message):
    with pytest.raises(ConfigError, match=message):
        toy_run(steps=1, **options)


def test_the_address_may_be_in_a_variable(monkeypatch):
    monkeypatch.setenv("MILES_HOOK", "https://hooks.example.org/secret")
    assert webhook_address("$MILES_HOOK") == "https://hooks.example.org/secret"
    check_command(f"{sys.executable} -c pass")
