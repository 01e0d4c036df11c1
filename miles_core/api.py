"""The Python API: start or plan a run, and read the results of one.

``train`` and ``plan`` take the options of ``miles train`` as keyword arguments. Every flag, including those of installed plugins, is an
argument of the same name with underscores: ``--rollout-batch-size 8`` is ``rollout_batch_size=8``. Switches take True or False, lists take
Python lists, and ``None`` leaves an option unset.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.plugin.plan import Plan
    from miles_core.primitives import OpenRun

__all__ = ["Result", "arguments", "open_run", "plan", "report", "samples", "train"]


@dataclass(frozen=True)
class Result:
    """The result of a training run.

    Attributes:
        directory: the run directory.
        metrics: one record per step, ``{"step": 3, "reward/mean": 0.4, ...}``; step 0 holds the measurements before training.
        step: number of completed steps.
        of: number of requested steps.
        why: ``finished``, or ``stopped by SIGINT`` (for example, the notebook kernel was interrupted).
        checkpoint: the last checkpoint; None if no step was completed.
        export: the exported model; None without ``export_hf``.
    """

    directory: Path
    metrics: list[dict[str, Any]] = field(repr=False)
    step: int
    of: int
    why: str
    checkpoint: Path | None
    export: Path | None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which the metric ``name`` was recorded, and its values. A value that was not finite is NaN."""
        from miles_core.observe.metrics import series

        return series(self.metrics, name)

    def samples(self, kind: str = "train", step: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the samples stored in the run directory; see the function ``samples``."""
        return samples(self.directory, kind, step)

    def report(self) -> Path:
        """Write the run's HTML report and return its path; see the function ``report``."""
        return report(self.directory)


def train(*, quiet: bool = False, **options: Any) -> Result:
    """Train as ``miles train`` does and return when the run ends. Also works inside a running event loop, such as a notebook's.

    SIGINT (an interrupted notebook kernel) stops the training at its last completed step, saves that step and returns the result.
    ``train(load=result.directory)`` continues the run.

    Args:
        quiet: show no progress; ``run.log`` in the run directory still receives all messages.
        options: flags with underscores, including ``config`` (one file or a list of files) and ``plugins`` (names).

    Raises:
        ConfigError: options that do not exist or have invalid values; one error reports all of them.
        PlanError: the run cannot work; reports every reason and the changes that would make it work.
        MilesError: the error that ended the training. Its notes name the location of the last completed step.

    Example:
        >>> result = train(hf_checkpoint="model/", prompt_data="prompts.jsonl", rm_type="math", label_key="label", num_rollout=20, lr=1e-6)
        >>> result.series("reward/mean")
    """
    from rich.console import Console

    from miles_core.config.command import Command
    from miles_core.config.load import load
    from miles_core.launch import launch
    from miles_core.observe.metrics import read
    from miles_core.run.checks import plan_run
    from miles_core.run.prepare import localise

    requested = load(arguments(options), command=Command())
    config, accepted, catalogue = plan_run(requested)
    localise(requested)  # download the weights too, now that the plan is accepted
    done = launch(config, accepted, catalogue, Console(quiet=True) if quiet else None)
    end, directory = done.ending, done.run.directory
    return Result(
        directory=directory,
        metrics=read(directory / "metrics.jsonl"),
        step=end.step,
        of=end.of,
        why=end.why,
        checkpoint=Path(end.checkpoint) if end.checkpoint else None,
        export=Path(end.export) if end.export else None,
    )


def plan(**options: Any) -> Plan:
    """Resolve a run as ``miles plan`` does, without building or writing anything.

    Args:
        options: as for ``train``.

    Raises:
        ConfigError, PlanError: as for ``train``.
    """
    from miles_core.config.command import Command
    from miles_core.config.load import load
    from miles_core.run.prepare import apply_plan, prepare

    config = load(arguments(options), command=Command())
    accepted, _ = prepare(config)
    apply_plan(config, accepted)
    return accepted


@asynccontextmanager
async def open_run(**options: Any) -> AsyncIterator[OpenRun]:
    """Open the policies of a run without running its loop: a context whose ``policies`` have ``sample``, ``log_probs``, ``forward_backward``,
    ``optimizer_step``, ``sync``, ``save_state``, ``load_state`` and ``export`` (``miles_core.primitives``; ``examples/grpo.py``).

    Args:
        options: as for ``train``. Prompts and rewards are the caller's, so options for them are not needed.

    Raises:
        ConfigError, PlanError: as for ``train``.
    """
    from miles_core.config.command import Command
    from miles_core.config.load import load
    from miles_core.primitives import open_requested

    async with open_requested(load(arguments(options), command=Command())) as opened:
        for policy in [*opened.run.policies]:
            await opened.add(policy)
        yield opened


def samples(run_dir: Path | str, kind: str = "train", step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the samples that a run stored on disk, in step order.

    Each sample is a mapping; docs/data.md lists its keys.

    Args:
        run_dir: the run directory.
        kind: ``train``, or ``eval`` for the responses to held-out prompts.
        step: yield only the samples of this step; by default those of every stored step.

    Raises:
        MilesError: ``kind`` does not exist, or no samples of that step are on disk.
    """
    from miles_core.plugin.load import find_part

    read_samples: Callable[..., Iterator[dict[str, Any]]] = find_part("samples", "read", "miles-core")
    return read_samples(run_dir, kind, step)


def report(run_dir: Path | str) -> Path:
    """Write the HTML report of a finished or running run and return its path. The file is self-contained.

    Raises:
        MilesError: ``run_dir`` is not a run directory.
    """
    from miles_core.plugin.load import find_part

    write: Callable[[Path | str], Path] = find_part("report", "html", "miles-core")
    return write(run_dir)


def arguments(options: dict[str, Any]) -> list[str]:
    """Convert keyword options to command-line arguments."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}={item}" for item in value]
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words
