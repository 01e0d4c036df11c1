"""Start of a worker process: it validates the driver's plan and creates its own run.

The driver sends a ``WorkerSpec`` of plain texts. The worker does not resolve the plan: it checks that its own installation and hardware
fit (``miles_core.run.prepare.accept``), reads the configuration, and creates a run with the same hooks.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.checkpoint.rng import seed_generators
from miles_core.config.load import loads
from miles_core.contracts.run import Run
from miles_core.plugin.plan import Plan
from miles_core.run.make import make_run, packages
from miles_core.run.prepare import accept, apply_plan


@dataclass(frozen=True)
class WorkerSpec:
    """Data that the driver sends to a worker.

    Attributes:
        plan: the accepted plan, ``Plan.to_json``.
        config: the effective configuration, ``Config.to_yaml``.
        directory: absolute path of the run directory, on a file system that all workers share.
        home: the driver's working directory; relative paths of the configuration are relative to it.
    """

    plan: str
    config: str
    directory: str
    home: str

    @classmethod
    def of(cls, run: Run) -> WorkerSpec:
        """Create the spec of the workers of the driver's ``run``."""
        return cls(run.plan.to_json(), run.config.to_yaml(), str(run.directory.absolute()), str(Path.cwd()))


def worker_run(spec: WorkerSpec) -> Run:
    """Create the run of a worker process: validate the plan and load the hooks, without building parts.

    Raises:
        PlanError: the installed versions differ from the driver's, or a rule does not hold on this worker.
        PluginError, CheckpointError, ConfigError: plugins, checkpoint or configuration cannot be used on this worker.
    """
    if Path(spec.home).is_dir():
        os.chdir(spec.home)
    plan = Plan.from_json(spec.plan)
    catalogue = accept(plan)
    config = apply_plan(loads(spec.config, catalogue), plan)
    for package in packages(plan, catalogue):
        logging.getLogger(package).setLevel(config.run.log_level.upper())
    seed_generators(config.train.seed)
    return make_run(config, plan, catalogue, Path(spec.directory))


class Worker:
    """A process's part of a run. A runtime creates it in the process, forwards each ``Workers.send`` to it, and ends the process
    after ``close``.

    Args:
        spec: what the driver sends.
        policy: name of this worker's policy.
    """

    #: the engine or rank; None until it is built
    part: Any = None

    def __init__(self, spec: WorkerSpec, policy: str) -> None:
        self.run = worker_run(spec)
        self.run.hooks.on("on_start", run=self.run)
        self.policy = next(p for p in self.run.policies if p.name == policy)

    async def answer(self, method: str, *args: Any) -> Any:
        """Call a method of this worker, or else of its part, and return the result; for an attribute, return its value."""
        found = getattr(self if hasattr(type(self), method) else self.part, method)
        result = found(*args) if callable(found) else found
        return await result if inspect.isawaitable(result) else result

    def beat(self) -> tuple[str, ...]:
        """Return the names of the workers that this one waits for. Called in another thread while the worker computes."""
        return ()

    def confirm_plan(self) -> None:
        """The first call of a worker, which raises what its constructor raised, such as a PlanError."""

    async def close(self) -> None:
        """Release all resources."""
        gc.unfreeze()
        self.run.hooks.on("on_stop", run=self.run, error=None)
