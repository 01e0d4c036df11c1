"""How a run ended: told on the screen and in ``run.log``, and kept in ``ending.json`` for the report."""

from __future__ import annotations

import json
import logging
import shlex
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from miles_core.checkpoint.directory import Checkpoints, checkpoint_step
from miles_core.contracts.run import Run
from miles_core.redact import redact

log = logging.getLogger(__name__)

#: The file of a run directory that says how the run ended.
ENDING = "ending.json"


@dataclass(frozen=True)
class Ending:
    """What a person wants to know at the end of a run.

    Attributes:
        why: ``finished``, ``stopped by SIGTERM``, or the error in one line.
        step: completed steps; ``of``: those asked for.
        directory: the run's.
        checkpoint: the last one there; empty without.
        export: the exported model; empty without.
    """

    why: str
    step: int
    of: int
    directory: str
    checkpoint: str = ""
    export: str = ""

    def lines(self) -> list[str]:
        """The last lines of a run: where everything is, and the command that goes on."""
        saved = checkpoint_step(Path(self.checkpoint)) if self.checkpoint else 0
        held = self.checkpoint or "none: the same command starts again"
        if self.step > saved:
            steps = f"step {self.step}" if self.step == saved + 1 else f"steps {saved + 1} to {self.step}"
            held += f"; {steps} could not be saved"
        lines = [f"{self.why}; {self.step} of {self.of} steps are complete", f"checkpoint: {held}"]
        lines += [f"export: {self.export}"] if self.export else []
        directory = shlex.quote(self.directory)
        lines.append(f"report: miles report {directory}")
        if self.checkpoint:
            more = "" if self.step < self.of else " --num-rollout N"
            lines.append(f"to go on: miles train --load {directory}{more}")
        return lines


def ending(run: Run, signal: str | None = None, error: BaseException | None = None) -> Ending:
    """How ``run`` ended: by a signal (its name), an error, or at its last step. Written to ``ending.json``."""
    why = "finished"
    if error is not None:
        why = f"ended by {type(error).__name__}: {error}"
    elif signal is not None:
        why = f"stopped by {signal}"
    checkpoints = Checkpoints(run.directory / "checkpoints")
    last, target = checkpoints.latest(), run.config.run.export_hf
    exported = target is not None and any(Path(target).glob("**/config.json"))
    found = Ending(
        why=redact(" ".join(why.split())),
        step=run.step,
        of=run.config.rollout.num_rollout,
        directory=str(run.directory),
        checkpoint="" if last is None else str(checkpoints.path(last)),
        export=str(target) if exported else "",
    )
    with suppress(OSError):  # the disk may be what ended the run
        (run.directory / ENDING).write_text(json.dumps({**asdict(found), "time": time.time()}), encoding="utf-8")
    return found
