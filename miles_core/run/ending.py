"""Describes the end of a run on the screen and in ``run.log``, and saves it to ``ending.json`` for the report."""

from __future__ import annotations

import json
import logging
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_core.checkpoint.directory import Checkpoints, checkpoint_step
from miles_core.config.rules import count_steps
from miles_core.contracts.run import Run
from miles_core.redact import redact
from miles_core.run.evaluation import has_evaluation
from miles_core.text import describe_error

log = logging.getLogger(__name__)

#: File in the run directory that holds an ``Ending`` as JSON.
ENDING = "ending.json"


@dataclass(frozen=True)
class Ending:
    """Summary of a run that has ended.

    Attributes:
        why: ``finished``, ``stopped by SIGTERM``, or the error in one line.
        step: number of completed steps.
        of: number of configured steps.
        directory: the run directory.
        checkpoint: path of the last checkpoint; "" if there is none.
        export: path of the exported model; "" if there is none.
        decay: optimiser steps over which the learning rate decays, if it decays until the end of the run; else 0.
    """

    why: str
    step: int
    of: int
    directory: str
    checkpoint: str = ""
    export: str = ""
    decay: int = 0

    def lines(self) -> list[str]:
        """Return the final lines of a run: locations of its results, and the command that continues it."""
        saved = checkpoint_step(Path(self.checkpoint)) if self.checkpoint else 0
        again = "delete the directory, or choose another one with --save," if self.step else "run the same command"
        lost = "" if Path(self.directory).is_dir() else "unknown: the run's directory is gone"
        held = self.checkpoint or lost or f"none: {again} to start again"
        if self.step > saved:
            steps = f"step {self.step}" if self.step == saved + 1 else f"steps {saved + 1} to {self.step}"
            held += f"; {steps} could not be saved"
        lines = [f"{self.why}; {self.step} of {self.of} steps are complete", f"checkpoint: {held}"]
        lines += [f"export: {self.export}"] if self.export else []
        directory = shlex.quote(self.directory)
        lines.append(f"report: miles report {directory}")
        if self.checkpoint:
            more = "" if self.step < self.of else " --num-rollout N"
            more += f" --lr-decay-iters {self.decay}" if more and self.decay else ""
            lines.append(f"to continue: miles train --load {directory}{more}")
        return lines


def is_complete(run: Run, checkpoint: Path) -> bool:
    """Return whether nothing is left to do for a run that continues ``checkpoint``: no step, evaluation, checkpoint or export."""
    config, step = run.config, checkpoint_step(checkpoint)
    return (
        step >= config.rollout.num_rollout
        and checkpoint.resolve() == Checkpoints(run.directory / "checkpoints").path(step).resolve()
        and config.run.export_hf is None
        and (not config.evaluation.interval or has_evaluation(run.directory, step))
    )


def find_untrained(run: Run) -> str:
    """Return a warning if no step trained a policy that should learn, while others did; else ""."""
    learning = [policy for policy in run.policies if policy.role == "train"]
    idle = [policy.name for policy in learning if not policy.trained]
    if not run.step or not idle or len(idle) == len(learning):
        return ""
    return (
        f"no step trained {', '.join(idle)}: a policy learns from the samples that name it (Sample.policy, which a rollout function sets), "
        f"and a sample without a name belongs to {run.policy.name}"
    )


def record_ending(run: Run, why: str) -> Ending:
    """Describe the end of ``run`` and write it to ``ending.json``. why: see ``Ending``."""
    checkpoints = Checkpoints(run.directory / "checkpoints")
    last, target, train = checkpoints.find_latest(), run.config.run.export_hf, run.config.train
    exported = target is not None and any(Path(target).glob("**/config.json"))
    found = Ending(
        why=redact(" ".join(why.split())),
        step=run.step,
        of=run.config.rollout.num_rollout,
        directory=str(run.directory),
        checkpoint="" if last is None else str(checkpoints.path(last)),
        export=str(target) if exported else "",
        decay=0 if train.lr_schedule == "constant" or train.lr_decay_iters else count_steps(run.config.get),
    )
    with suppress(OSError):  # a full disk may be the reason for the end
        (run.directory / ENDING).write_text(json.dumps({**asdict(found), "time": time.time()}), encoding="utf-8")
    for function in run.at_end:
        try:
            function(found.step, found.why)
        except Exception as error:
            log.warning(
                "%s at the end of the run: %s", getattr(function, "__qualname__", function), describe_error(error)
            )
    return found
