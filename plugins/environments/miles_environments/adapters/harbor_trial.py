"""One trial of Harbor: a process whose result is a reward."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from miles_environments.environment import EnvironmentFault

#: A run in the background of a shell ignores SIGINT, and so would its children.
INTERRUPTIBLE = ("env", "--default-signal=INT")
#: Seconds for a trial that is cancelled to remove its container.
GRACE = 60.0


class Trial:
    """One process of Harbor, whose result is the reward."""

    def __init__(self, command: list[str], config: Mapping[str, Any], reward: str) -> None:
        self.result: Future[float] = Future()
        self._reward = reward
        self._folder = Path(tempfile.mkdtemp(prefix="miles-harbor-"))
        (self._folder / "trial.json").write_text(
            json.dumps({**config, "trials_dir": str(self._folder), "trial_name": "trial"})
        )
        with (self._folder / "log.txt").open("w") as output:
            self._process = subprocess.Popen(
                [*INTERRUPTIBLE, *command, "-c", str(self._folder / "trial.json")],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.result.add_done_callback(self._stop)
        self._waiting = threading.Thread(target=self._wait, daemon=True)
        self._waiting.start()

    @property
    def running(self) -> bool:
        """Whether the process runs, or its folder still exists."""
        return self._waiting.is_alive()

    def close(self) -> None:
        """Interrupt the process, and wait until it has removed its container."""
        self.result.cancel()
        self._waiting.join(2 * GRACE)

    def _stop(self, result: Future[float]) -> None:
        if result.cancelled():
            self._process.send_signal(signal.SIGINT)
            timer = threading.Timer(GRACE, self._process.kill)
            timer.daemon = True
            timer.start()

    def _wait(self) -> None:
        self._process.wait()
        try:
            found: float | Exception = self._read()
        except Exception as error:  # also a result that was not written completely
            found = error
        shutil.rmtree(self._folder, ignore_errors=True)
        if self.result.set_running_or_notify_cancel():
            if isinstance(found, Exception):
                self.result.set_exception(found)
            else:
                self.result.set_result(found)

    def _read(self) -> float:
        path = self._folder / "trial" / "result.json"
        if not path.is_file():
            end = (self._folder / "log.txt").read_text(errors="replace").strip()[-500:]
            raise EnvironmentFault(f"harbor ended with code {self._process.returncode} and no result: {end}")
        result = json.loads(path.read_text())
        rewards = (result.get("verifier_result") or {}).get("rewards")
        if rewards is None:
            error = result.get("exception_info") or {}
            what = " ".join(str(error.get("exception_message", "")).split())
            raise EnvironmentFault(f"the trial has no reward ({error.get('exception_type')}: {what[-300:]})")
        if self._reward not in rewards:
            raise EnvironmentFault(
                f"the trial has the rewards {sorted(rewards)}, not {self._reward!r}; select one with reward=NAME"
            )
        return float(rewards[self._reward])
