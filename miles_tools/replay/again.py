"""Repeats the training of a recorded step, and compares the result with the record."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.checkpoint.directory import run_of
from miles_core.errors import MilesError
from miles_tools.replay import STORED
from miles_tools.replay.compare import MEASURED, Difference, StepComparison
from miles_tools.replay.steps import check_recorded
from miles_tools.replay.stored_run import StoredRun
from miles_tools.replay.tolerance import Tolerance

if TYPE_CHECKING:
    from miles_core.config.config import Config

#: Relative tolerance on a GPU without ``--embedded-deterministic``, where sums of gradients have no fixed order.
GPU_TOLERANCE = 1e-2
#: Options of a repeated run that differ from those of the run: it has no engine, and does not evaluate.
_CHANGED: dict[str, Any] = {
    "schedule": STORED,
    "replay.debug_train_only": True,
    "replay.debug_rollout_only": False,
    "replay.record_steps": True,
    "evaluation.interval": None,
    "evaluation.prompt_data": (),
    "evaluation.prompts": (),
    "save_interval": None,
    "async_save": False,
    "export_hf": None,
    "profile": False,
    "verify_logprobs": False,
    "model.self_check": False,
    "rollout.workers": None,
    "log_level": "warning",
}
#: Metrics that training and the samples determine.
_DETERMINED = re.compile(r"(^|/)(train|mismatch|reward)/|(^|/)rollout/(length|truncated|samples|tokens$)")


@dataclass(frozen=True)
class Repeated:
    """A repeated step.

    Attributes:
        step: the step.
        start: number of completed steps in the checkpoint from which it was repeated; 0 for the initial weights.
        tolerance: relative tolerance of the comparison; 0 is bit for bit.
        rows: (name, value in the run, value of the repetition, whether they agree).
        difference: the first difference in the repeated steps; None if they agree.
    """

    step: int
    start: int
    tolerance: float
    rows: list[tuple[str, str, str, bool]]
    difference: Difference | None


def repeat_step(directory: Path | str, step: int, target: Path, tolerance: float | None = None) -> Repeated:
    """Repeat step ``step`` of a run from its nearest earlier checkpoint (its initial weights without one), with the steps between.

    Args:
        directory: the run, which is not changed.
        step: a recorded step.
        target: directory of the repeated run, which is created.
        tolerance: relative tolerance; None is 0 on a CPU and with ``--embedded-deterministic``, else ``GPU_TOLERANCE``.

    Raises:
        MilesError: the run cannot be read, or one of the steps was not recorded.
    """
    from rich.console import Console

    from miles_core.config.load import load
    from miles_core.launch import launch
    from miles_core.run.checks import plan_run
    from miles_core.run.prepare import localise

    run = StoredRun(directory)
    source = run.path
    check_recorded(source, step)
    earlier = [number for number in run.checkpoints.steps() if number < step]
    checkpoint = run.checkpoints.path(earlier[-1]) if earlier else None
    start = earlier[-1] if earlier else min(run.steps) - 1
    for between in range(start + 1, step):
        check_between(source, between, start, step)
    requested = configure(load(["--config", str(source / "config.yaml")]), source, checkpoint, step, target)
    config, plan, catalogue = plan_run(requested)
    localise(requested)
    with use_threads(run.threads(step)):
        if launch(config, plan, catalogue, Console(quiet=True)).signal:
            raise MilesError(f"{source}: stopped before step {step} was repeated")
    again = StoredRun(target)
    if tolerance is None:
        tolerance = default_tolerance(again)
    found = None
    for number in range(start + 1, step + 1):
        found = found or next(StepComparison(run, again, number, Tolerance(tolerance)).differences(), None)
    if found is not None:
        found = replace(found, plugins=())  # only options of the repetition differ
    return Repeated(step, start, tolerance, list(compare_results(run, again, step, tolerance)), found)


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Compute with ``count`` threads in this process and in those that it starts: products on a CPU round by their number."""
    import torch

    if count is None:
        yield
        return
    before, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(count)
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if variable is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = variable


def check_between(run: Path, between: int, start: int, step: int) -> None:
    """Raise MilesError if a step between the checkpoint and the repeated one was not recorded."""
    try:
        check_recorded(run, between)
    except MilesError as error:
        raise MilesError(
            f"{error}; step {step} cannot be repeated without it, because the nearest earlier checkpoint is that of step {start}"
        ) from error


def configure(config: Config, source: Path, checkpoint: Path | None, step: int, target: Path) -> Config:
    """Return the configuration of the repetition. checkpoint: from which it continues; None for the start of the run."""
    load = config.run.load
    if checkpoint is not None:
        load = checkpoint
    elif load is not None and run_of(load).resolve() == source:  # the run was resumed in its own directory
        load = None
    # what an option needs may be off in the repetition, such as another schedule: then it has no effect, and is not the user's
    options = config.schema.options.values()
    conditional = {o.path: config.get(o.path) for o in options if o.info.only_if}
    senders = {p.name for p in config.schema.manifests.values() if p.provides.keys() == {"sink"} and not p.hooks}
    silent = {
        o.path: o.default for o in options if o.group in senders
    }  # no metrics, traces or alerts of the repetition
    own = {
        "save": target,
        "load": load,
        "replay.load_debug_rollout_data": source,
        "replay.debug_last_step": step,
    }
    return config.replace(conditional | silent | _CHANGED | own, origin="miles replay")


def default_tolerance(run: StoredRun) -> float:
    """Return the tolerance of a comparison on this machine."""
    on_gpu = run.versions.get("gpus", "[]") != "[]" and run.options.get("model.device") != "cpu"
    return GPU_TOLERANCE if on_gpu and not run.options.get("embedded.deterministic") else 0.0


def compare_results(
    run: StoredRun, again: StoredRun, step: int, tolerance: float
) -> Iterator[tuple[str, str, str, bool]]:
    """Yield (name, value in the run, value of the repetition, whether they agree) of loss, gradient norm, metrics and checksums."""
    same = Tolerance(tolerance)
    one, other = run.metrics.get(step, {}), again.metrics.get(step, {})
    names = [n for n in one if n in other and _DETERMINED.search(n) and not MEASURED.search(n)]
    equal = [n for n in names if same.find(one[n], other[n]) is None]
    for name in names:
        if name.endswith(("train/loss", "train/grad_norm")) or name not in equal:
            yield name, f"{one[name]!r}", f"{other[name]!r}", name in equal
    yield "metrics", f"{len(names)}", f"{len(equal)} agree", len(equal) == len(names)
    if tolerance:
        return
    sums = [each.sums(step) for each in (run, again)]
    for kind, title in (("gradients", "gradients"), ("after", "weights")):
        flat = [_flatten(each, kind) for each in sums]
        if flat[0] and flat[1]:
            count = sum(flat[0].get(name) == value for name, value in flat[1].items())
            yield title, f"{len(flat[0])} tensors", f"{count} with equal checksums", flat[0] == flat[1]


def _flatten(sums: dict[str, list[dict[str, dict[str, int]]]], kind: str) -> dict[tuple[str, int, str], int]:
    return {
        (owner, number, tensor): value
        for owner, steps in sums.items()
        for number, each in enumerate(steps)
        for tensor, value in each.get(kind, {}).items()
    }
