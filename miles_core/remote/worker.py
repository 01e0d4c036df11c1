"""What a process that trains or generates does first: accept the plan, make its run.

The driver sends an ``Order`` of plain texts. The worker resolves nothing: it checks that its own installation and hardware fit
the plan (``miles_core.run.prepare.accept``), reads the configuration, and makes a run of its own with the same hooks.
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
from miles_core.run.make import make_run
from miles_core.run.prepare import accept, apply_plan


@dataclass(frozen=True)
class Order:
    """What a worker is sent.

    Attributes:
        plan: the accepted plan, ``Plan.to_json``.
        config: the effective configuration, ``Config.to_yaml``.
        directory: of the run, absolute; on a file system that every worker sees.
        home: the driver's working directory, from which relative paths of the configuration start.
    """

    plan: str
    config: str
    directory: str
    home: str

    @classmethod
    def of(cls, run: Run) -> Order:
        """What the workers of the driver's ``run`` are sent."""
        return cls(run.plan.to_json(), run.config.to_yaml(), str(run.directory.absolute()), str(Path.cwd()))


def worker_run(order: Order) -> Run:
    """The run of a worker process: the plan accepted, the hooks loaded, nothing built yet.

    Raises:
        PlanError: other versions are installed here, or a rule does not hold on this worker.
        PluginError, CheckpointError, ConfigError: plugins, checkpoint or configuration cannot be used here.
    """
    if Path(order.home).is_dir():
        os.chdir(order.home)
    plan = Plan.from_json(order.plan)
    catalogue = accept(plan)
    config = apply_plan(loads(order.config, catalogue), plan)
    for package in {hook.target.split(".")[0].split(":")[0] for hook in plan.hooks}:
        logging.getLogger(package).setLevel(config.run.log_level.upper())
    seed_generators(config.train.seed)
    return make_run(config, plan, catalogue, Path(order.directory))


class Worker:
    """A process's part of a run. A runtime makes it there, hands it every call of ``Workers.send`` and ends the process after
    ``close``.

    Args:
        order: what the driver sent.
        policy: the name of the policy that this worker is of.
    """

    #: what it holds once it is built
    part: Any = None

    def __init__(self, order: Order, policy: str) -> None:
        self.run = worker_run(order)
        self.run.hooks.on("on_start", run=self.run)
        self.policy = next(p for p in self.run.policies if p.name == policy)

    async def answer(self, method: str, *args: Any) -> Any:
        """What a method of this worker, or else of the part it holds, returns; an attribute is its value."""
        found = getattr(self if hasattr(type(self), method) else self.part, method)
        result = found(*args) if callable(found) else found
        return await result if inspect.isawaitable(result) else result

    def beat(self) -> tuple[str, ...]:
        """The names of the workers that this one waits for. Called in another thread while the worker computes."""
        return ()

    def digest(self) -> str:
        """Of the plan that was accepted here."""
        return self.run.plan.digest

    async def close(self) -> None:
        """Release everything."""
        gc.unfreeze()
        self.run.hooks.on("on_stop", run=self.run, error=None)
