"""Hooks of the plugin: start SGLang's process before the run builds its trainers."""

from __future__ import annotations

import re
from typing import Any

from miles_core.plugin import hookimpl
from miles_sglang.build import environment_of, log_file_of
from miles_sglang.spawn import EARLY, WORKER, spawn
from miles_workers import worker_name

#: Names of the workers that have an engine; with several policies the policy's name comes first.
_ENGINE = re.compile(r"(?:(.+)-)?engine-\d+")


class Early:
    """Starts the process of this process's (first) engine: in the driver if the engine runs there, else in each engine's worker."""

    @hookimpl
    def on_start(self, run: Any) -> None:
        if run.config.run.engine != "sglang":
            return
        policy = next((policy for policy in run.policies if policy.generates and _has_engine(run, policy)), None)
        if policy is not None and (changes := environment_of(run, policy)) is not None:
            log_file = log_file_of(run)
            run.state[EARLY] = {log_file: spawn(WORKER, changes, log_file)}

    @hookimpl
    def on_stop(self, run: Any) -> None:
        for spawned in run.state.get(EARLY, {}).values():
            spawned.drop()


def _has_engine(run: Any, policy: Any) -> bool:
    """Whether an engine of the policy runs in this process."""
    if run.config.run.runtime == "inline":
        return True
    found = _ENGINE.fullmatch(worker_name())
    return found is not None and found[1] in (None, policy.name)
