"""Alerts: a command or an HTTP request for each hint, and when a run stops before its last step.

An alert never ends a run and never delays a step: one thread delivers alerts in order, each within a time limit, and failures are logged.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shlex
import subprocess
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError, MilesError, first_line
from miles_core.redact import redact
from miles_tools.http_client import check_url, exchange

if TYPE_CHECKING:
    from miles_core.contracts.run import Run

log = logging.getLogger(__name__)

#: Seconds that one alert may take.
TIMEOUT = 10.0
#: Alerts that wait for delivery; further ones are dropped.
MOST = 100


class Alerts:
    """A sink that sends hints and the end of a run that did not finish.

    Args:
        run: name of the run in the alerts.
        command: a command line; receives the alert as JSON on standard input. "" for none.
        webhook: an address; receives the alert as the JSON body of a POST request. "" for none.
    """

    def __init__(self, run: str, command: str = "", webhook: str = "") -> None:
        self._name, self._command, self._webhook = run, shlex.split(command), webhook
        self._waiting: queue.Queue[dict[str, str | int] | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._deliver, name="alerts", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics are not sent."""

    def write_hint(self, step: int, hint: str) -> None:
        """Send a hint."""
        self._send("hint", step, hint)

    def end(self, step: int, why: str) -> None:
        """Send why the run stopped, unless it finished, and wait for the delivery of all alerts for at most ``TIMEOUT`` seconds."""
        if why != "finished":
            self._send("stopped", step, why)
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(TIMEOUT)

    def close(self) -> None:
        """Alerts that wait are delivered by ``end``, which follows."""

    def _send(self, kind: str, step: int, text: str) -> None:
        line = redact(f"{self._name}: {text}")
        try:
            self._waiting.put_nowait({"kind": kind, "run": redact(self._name), "step": step, "text": line})
        except queue.Full:
            log.warning("an alert is dropped, because %d others wait for delivery: %s", MOST, line)

    def _deliver(self) -> None:
        while (alert := self._waiting.get()) is not None:
            body = json.dumps(alert).encode()
            for send in (self._call, self._post):
                try:
                    send(body)
                except (OSError, subprocess.SubprocessError, MilesError) as error:
                    log.warning("an alert was not delivered: %s", redact(first_line(error)))

    def _call(self, body: bytes) -> None:
        if self._command:
            nowhere = subprocess.DEVNULL
            subprocess.run(self._command, input=body, stdout=nowhere, stderr=nowhere, timeout=TIMEOUT, check=True)

    def _post(self, body: bytes) -> None:
        if self._webhook:
            answer = exchange(self._webhook, body, {"Content-Type": "application/json"}, TIMEOUT, 1 << 16)
            if answer.status >= 300:
                raise MilesError(f"--alert-webhook: the service answered {answer.status} {answer.reason}")


def make_alerts(run: Run) -> Alerts | None:
    """Make the sink of ``--alert-command`` and ``--alert-webhook``."""
    options = run.config.plugin("sinks")
    if not (options.alert_command or options.alert_webhook):
        return None
    webhook = webhook_address(options.alert_webhook) if options.alert_webhook else ""
    alerts = Alerts(run.directory.absolute().name, options.alert_command or "", webhook)
    run.at_end.append(alerts.end)
    return alerts


def webhook_address(text: str) -> str:
    """Return the address of ``--alert-webhook``: the text, or for ``$NAME`` the value of this environment variable.

    Raises:
        ConfigError: it is not an http or https address, or the variable is not set.
    """
    if not text.startswith("$"):
        check_url(text, "--alert-webhook")
        return text
    address = os.environ.get(text.removeprefix("$"), "")
    if not address:
        raise ConfigError(f"--alert-webhook {text}: the environment variable is not set; export it, or give an address")
    check_url(address, f"--alert-webhook {text}")
    return address


def check_command(text: str) -> None:
    """Check ``--alert-command``.

    Raises:
        ConfigError: it is not a command line, or its program is not installed.
    """
    from shutil import which

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--alert-command {text}: {error}; close the quotation") from error
    if not words or which(words[0]) is None:
        raise ConfigError(f"--alert-command {text}: there is no program {(words or [''])[0]!r} on this machine")
