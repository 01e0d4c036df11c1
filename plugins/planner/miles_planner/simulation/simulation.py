"""Runs one simulation: core's training loop on a virtual clock."""

from __future__ import annotations

import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from miles_core.config.command import Command
from miles_core.config.config import Config
from miles_core.config.load import load
from miles_core.contracts.hooks import load_hooks
from miles_core.contracts.run import Policy, Run
from miles_core.data.prompts import PromptTemplate
from miles_core.loop import train
from miles_core.observe.hints import Hints
from miles_core.observe.metrics import MetricLog
from miles_core.observe.progress import Progress
from miles_core.plugin.discovery import Catalogue, discover
from miles_core.plugin.plan import Plan
from miles_core.run.inputs import Inputs
from miles_core.run.log import RunLog
from miles_core.run.prepare import apply_plan, prepare
from miles_core.run.problems import Problems
from miles_planner.simulation import parts
from miles_planner.simulation.clock import VirtualLoop
from miles_planner.simulation.cluster import SimulatedRuntime
from miles_planner.simulation.description import describe_setup
from miles_planner.simulation.providers import RUNTIME
from miles_planner.simulation.setup import NAME, Setup, parse_setup

#: Options that a simulation sets itself: the parts of the run, and everything that writes files.
FIXED = (
    *("--plugins", parts.__file__, "--runtime", NAME, "--prompts", NAME, "--rm-type", NAME),
    *("--use-rollout-logprobs", "--no-save-rollouts", "--no-self-check"),
)
SIMULATE = Command(("miles", "simulate"))
Report = Callable[[int, float], None]


@dataclass(frozen=True)
class StepRecord:
    """One step: virtual time at its end, counts up to then, and core's metrics."""

    at: float
    engine_busy: float
    occupied: float
    trainer_busy: float
    trained: int
    generated: float
    metrics: Mapping[str, float]


@dataclass
class Simulated:
    """A finished simulation.

    Attributes:
        name: description of what was simulated.
        setup: its sizes and speeds.
        steps: one record per step, after one for the start.
        running: number of requests decoded, over time.
        training: 1 while the trainer trained, over time.
        failures: engines that failed.
        wall: real seconds of the simulation.
        assumed: lines that say which lengths and speeds were given, measured or computed.
    """

    name: str
    setup: Setup
    steps: list[StepRecord]
    running: list[tuple[float, int]]
    training: list[tuple[float, int]]
    failures: int = 0
    wall: float = 0.0
    assumed: tuple[str, ...] = ()
    seconds: list[float] = field(init=False)

    def __post_init__(self) -> None:
        ends = [step.at for step in self.steps]
        self.seconds = [b - a for a, b in pairwise(ends)]

    def summary(self) -> dict[str, float]:
        """Return averages over the steps after the warm-up.

        ``engine_busy`` and ``trainer_busy`` are fractions of the time, ``gpu_busy`` weights them with the GPUs; ``running`` is the mean
        number of requests that an engine decodes; tokens are response tokens.
        """
        first, last = self.steps[self.setup.warm_up], self.steps[-1]
        time, count = last.at - first.at, len(self.steps) - 1 - self.setup.warm_up
        setup = self.setup
        engine = (last.engine_busy - first.engine_busy) / time / setup.engines
        trainer = (last.trainer_busy - first.trainer_busy) / time
        shared = setup.gpus < setup.engine_gpus + setup.trainer_gpus
        used = engine + trainer if shared else (engine * setup.engine_gpus + trainer * setup.trainer_gpus) / setup.gpus
        metrics = [step.metrics for step in self.steps[1 + setup.warm_up :]]
        trained = last.trained - first.trained

        def mean(name: str) -> float:
            return statistics.fmean(found.get(name, 0.0) for found in metrics)

        return {
            "seconds_per_step": time / count,
            "tokens_per_second": trained / time,
            "tokens_per_second_per_gpu": trained / time / setup.gpus,
            "gpu_busy": used,
            "engine_busy": engine,
            "trainer_busy": trainer,
            "running": (last.occupied - first.occupied) / time / setup.engines,
            "staleness_mean": mean("rollout/staleness_mean"),
            "staleness_max": max(found.get("rollout/staleness_max", 0.0) for found in metrics),
            "stale_tokens": mean("rollout/stale_tokens"),
            "dropped_groups": sum(found.get("rollout/dropped_groups", 0.0) for found in metrics),
            "tokens_generated_per_trained": (last.generated - first.generated) / max(trained, 1),
            "length_mean": trained / count / (_samples(metrics) or 1),
            "failures": float(self.failures),
        }


def _samples(metrics: Sequence[Mapping[str, float]]) -> float:
    return statistics.fmean(found["rollout/samples"] for found in metrics)


class _Recorder(Progress):
    """Records every completed step, and reports progress."""

    def __init__(self, total: int, report: Report | None) -> None:
        super().__init__(total)
        self.records: list[StepRecord] = []
        self.report = report
        self.runtime: SimulatedRuntime

    def begin(self) -> None:
        self._record({})

    def step(self, metrics: Mapping[str, float], done: int | None = None) -> None:
        super().step(metrics, done)
        self._record(metrics)

    def advance(self, count: int = 1) -> None:
        if self.report is not None:
            self.report(self.done, asyncio.get_running_loop().time())

    def _record(self, metrics: Mapping[str, float]) -> None:
        engines, trainer = self.runtime.engines, self.runtime.trainer
        now = asyncio.get_running_loop().time()
        self.records.append(
            StepRecord(
                now,
                engines.busy_seconds,
                engines.occupied_seconds,
                trainer.busy_seconds,
                trainer.trained,
                self.runtime.ledger.generated,
                {name: value for name, value in metrics.items() if name.startswith("rollout/")},
            )
        )


class _Tokenizer:
    """As much of a tokenizer as prompts and responses without text need."""

    eos_token_id, eos_token, chat_template, name_or_path = None, "", None, NAME

    def __len__(self) -> int:
        return 2

    def get_vocab(self) -> dict[str, int]:
        return {"end": 0, "text": 1}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1]

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return ""


def load_simulation(words: Sequence[str], command: Command) -> tuple[Config, Plan, Catalogue]:
    """Load the configuration of a simulation and resolve its plan.

    Raises:
        MilesError: a flag is invalid, or the plan is refused.
    """
    catalogue = discover()
    catalogue.add_file(Path(parts.__file__))
    config = load(words, manifests=catalogue, command=replace(command, after=(*command.after, *FIXED)))
    plan, catalogue = prepare(config, catalogue=catalogue)
    return apply_plan(config, plan), plan, catalogue


def simulate(
    words: Sequence[str], name: str = "", report: Report | None = None, command: Command = SIMULATE
) -> Simulated:
    """Simulate one run.

    Args:
        words: flags of ``miles train`` and ``miles simulate``.
        name: of the result; the schedule by default.
        report: called as the simulation advances, with the completed steps and the virtual seconds.
        command: the command of these flags, to which it may add some.

    Raises:
        MilesError: the flags or the run are invalid.
    """
    config, plan, catalogue = load_simulation(words, command)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="miles-simulate-") as directory, _quiet():
        setup = parse_setup(config)
        assumed = describe_setup(config, setup)
        rollout = config.rollout
        wanted = rollout.num_rollout
        sizes = {"max_response_len": -(-rollout.max_response_len // setup.unit), "num_rollout": wanted + setup.tail}
        config = config.replace({f"rollout.{name}": value for name, value in sizes.items()}, origin="the simulation")
        run = _make_run(config, plan, catalogue, Path(directory))
        runtime = run.state[RUNTIME] = SimulatedRuntime(run, setup)
        recorder = _Recorder(wanted, report)
        recorder.runtime = runtime
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(_run(run, recorder))
    return Simulated(
        name or config.run.schedule,
        runtime.setup,
        recorder.records[: wanted + 1],
        runtime.ledger.over_time.points,
        runtime.trainer.over_time.points,
        runtime.engines.failures,
        time.perf_counter() - start,
        assumed,
    )


def _make_run(config: Config, plan: Plan, catalogue: Catalogue, directory: Path) -> Run:
    tokenizer = cast(Any, _Tokenizer())
    hooks = load_hooks(plan, catalogue, config)
    template = PromptTemplate(tokenizer)
    return Run(
        config=config,
        plan=plan,
        hooks=hooks,
        fields=(),
        directory=directory,
        tokenizer=tokenizer,
        render=template,
        policies=[Policy()],
    )


async def _run(run: Run, recorder: _Recorder) -> None:
    """Run core's training loop."""
    log = RunLog(MetricLog(run.directory / "metrics.jsonl"), recorder, Hints(()))
    problems = Problems()
    inputs = Inputs(run.config, problems)
    problems.raise_all()
    try:
        await train(run, log, inputs)
    finally:
        log.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the log messages of the run: its table is the output."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
