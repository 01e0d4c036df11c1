"""Hooks of the plugin: start SGLang's process before the run builds its trainers."""

from __future__ import annotations

from typing import Any

from miles_core.plugin import hookimpl
from miles_sglang.build import environment_of, log_file_of
from miles_sglang.spawn import EARLY, WORKER, spawn


class Early:
    """Starts the process of a run's (first) engine before its trainers are built."""

    @hookimpl
    def on_start(self, run: Any) -> None:
        if run.config.run.runtime != "inline" or run.config.run.engine != "sglang":
            return
        policy = next((policy for policy in run.policies if policy.generates), None)
        if policy is not None and (changes := environment_of(run, policy)) is not None:
            log_file = log_file_of(run)
            run.stash[EARLY] = {log_file: spawn(WORKER, changes, log_file)}

    @hookimpl
    def on_stop(self, run: Any) -> None:
        for spawned in run.stash.get(EARLY, {}).values():
            spawned.drop()
