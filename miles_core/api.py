"""What Python programs and notebooks call: ``train`` and ``plan``, with the options of ``miles train`` as arguments, and what a run left.

Every flag is an argument of the same name with underscores (``--rollout-batch-size 8`` is ``rollout_batch_size=8``), the flags of
installed plugins included. Switches take True and False, lists take Python lists, and ``None`` stands for an option that is not given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import MilesError

if TYPE_CHECKING:
    from miles_core.plugin.plan import Plan

__all__ = ["Result", "arguments", "plan", "report", "samples", "train"]


@dataclass(frozen=True)
class Result:
    """What a training left behind.

    Attributes:
        directory: the run directory.
        metrics: one record a step, ``{"step": 3, "reward/mean": 0.4, ...}``; step 0 is what was measured before training.
        step: completed steps.
        of: the steps asked for.
        why: ``finished``, or ``stopped by SIGINT`` (a kernel that was interrupted).
        checkpoint: the last one; None where no step was completed.
        export: the exported model; None without ``export_hf``.
    """

    directory: Path
    metrics: list[dict[str, Any]]
    step: int
    of: int
    why: str
    checkpoint: Path | None
    export: Path | None

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric where it was measured; a value that was not finite is NaN."""
        from miles_core.observe.metrics import series

        return series(self.metrics, name)

    def samples(self, kind: str = "train", step: int | None = None) -> Iterator[dict[str, Any]]:
        """The samples that it kept on disk; see ``samples``."""
        return samples(self.directory, kind, step)

    def report(self) -> Path:
        """Write its report; see ``report``."""
        return report(self.directory)


def train(*, quiet: bool = False, **options: Any) -> Result:
    """Run a training to its end, as ``miles train`` does. Works inside of a running event loop, so in a notebook too.

    An interrupted kernel (SIGINT) ends the training at its last completed step, which is saved, and the result is returned;
    ``train(load=result.directory)`` goes on.

    Args:
        quiet: show no progress; ``run.log`` in the run directory has it all.
        options: flags with underscores, ``config`` (a file or several) and ``plugins`` (names) among them.

    Raises:
        ConfigError: an option does not exist or has a value it cannot take; all of them are told together.
        PlanError: the run cannot work, with every reason and with changes that would do.
        MilesError: what ended the training. Its notes say where the last completed step is kept.

    Example:
        >>> result = train(hf_checkpoint="model/", prompt_data="prompts.jsonl", rm_type="math", num_rollout=20, lr=1e-6)
        >>> result.series("reward/mean")
    """
    from rich.console import Console

    from miles_core.config.load import load
    from miles_core.launch import launch
    from miles_core.observe.metrics import read
    from miles_core.run.checks import plan_run
    from miles_core.run.prepare import localise

    given = load(arguments(options))
    config, accepted, catalogue = plan_run(given)
    localise(given)  # the weights too, now that the plan is accepted
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
    """What a run with these options would consist of, as ``miles plan`` says; nothing is built and nothing written.

    Args:
        options: as for ``train``.

    Raises:
        ConfigError, PlanError: as for ``train``.
    """
    from miles_core.config.load import load
    from miles_core.run.prepare import apply_plan, prepare

    config = load(arguments(options))
    accepted, _ = prepare(config)
    apply_plan(config, accepted)
    return accepted


def samples(run_dir: Path | str, kind: str = "train", step: int | None = None) -> Iterator[dict[str, Any]]:
    """The samples that a run kept on disk, one mapping each (docs/data.md lists its keys), in the order of their steps.

    Args:
        run_dir: the run directory.
        kind: ``train``, or ``eval`` for the answers to held-out prompts.
        step: only this one; by default every step that is there.

    Raises:
        MilesError: no such kind, or no samples of that step on disk.
    """
    from miles_core.observe.rollouts import read_rollouts

    return read_rollouts(run_dir, kind, step)


def report(run_dir: Path | str) -> Path:
    """Write the report of a run, also of one that is still running; returns the HTML file, which needs nothing else.

    Raises:
        MilesError: it is no run directory.
    """
    from miles_core.plugin.discovery import discover
    from miles_core.plugin.load import import_target

    for plugin in discover().values():
        if target := plugin.provides.get("report", {}).get("html"):
            page: Path = import_target(plugin.name, target)(run_dir)
            return page
    raise MilesError("no installed plugin writes reports; reinstall miles-core, whose tools bring one")


def arguments(options: dict[str, Any]) -> list[str]:
    """The command line that these options stand for."""
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
