"""Keep the checkpoint with the best value of an evaluation metric, in ``RUN/best``.

The files are hard links to those of ``RUN/checkpoints`` (copies where the file system has none), so they take no space until ``--keep``
deletes the original. ``--load RUN/best`` continues from it.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from miles_core.plugin import Run, hookimpl
from miles_pass_at_k.config import PassAtKConfig, check_metric

log = logging.getLogger(__name__)

FOLDER = "best"


class BestCheckpoint:
    """Links the best checkpoint. An evaluated step has a checkpoint, because the plan compares the intervals.

    Attributes:
        value: best value so far; None before the first evaluation after a step.
        step: its step.
    """

    def __init__(self, options: PassAtKConfig) -> None:
        assert options.keep_best is not None
        self.metric, self._sign = options.keep_best, 1.0 if options.keep_best_mode == "max" else -1.0
        self.value: float | None = None
        self.step = 0
        #: last saved step; later directories belong to an abandoned branch of the run
        self._saved = 0

    @hookimpl
    def on_evaluation(self, run: Run, metrics: dict[str, float]) -> None:
        self._compare(metrics, run.policy.version)  # of a concurrent evaluation, run.step may be one ahead

    @hookimpl
    def on_step(self, run: Run, metrics: dict[str, float]) -> None:
        check_metric("--keep-best", self.metric, metrics)
        self._link(run)  # a checkpoint is complete after the on_step of its step
        self._compare(metrics, run.step)
        if self.value is not None:
            metrics |= {"pass_at_k/best": self.value, "pass_at_k/best_step": float(self.step)}

    @hookimpl
    def on_stop(self, run: Run) -> None:
        self._link(run)
        if self.value is not None and (run.directory / FOLDER / _name(self.step)).is_dir():
            log.info(
                "best checkpoint: step %d, %s %.4g, in %s", self.step, self.metric, self.value, run.directory / FOLDER
            )

    @hookimpl
    def on_save(self, run: Run, policy: Any, store: Any) -> None:
        if policy is None:
            self._saved = run.step
        if policy is None and self.value is not None:
            store.put(FOLDER, data={"metric": self.metric, "value": self.value, "step": self.step})

    @hookimpl
    def on_load(self, run: Run, policy: Any, store: Any) -> None:
        if policy is not None:
            return
        for later in (run.directory / FOLDER).glob("step_*"):  # belongs to the abandoned branch
            if later.name > _name(run.step):
                shutil.rmtree(later)
        self._saved = run.step
        kept = store.get(FOLDER)[1] if FOLDER in store else {}
        if kept.get("metric") != self.metric:
            return
        self.value, self.step = float(kept["value"]), int(kept["step"])
        if not self._link(run):
            log.warning(
                "the best checkpoint so far, of step %d, is not in %s; the next one counts as the best",
                self.step,
                run.directory,
            )
            self.value = None

    def _compare(self, metrics: dict[str, float], step: int) -> None:
        value = metrics.get(self.metric)
        if value is not None and step > 0 and (self.value is None or self._sign * (value - self.value) > 0):
            self.value, self.step = value, step

    def _link(self, run: Run) -> bool:
        """Link the best checkpoint if it was saved, and remove the previous one; returns whether it is in the folder."""
        if self.value is None or self.step > self._saved:
            return False
        folder, name = run.directory / FOLDER, _name(self.step)
        if not (folder / name).is_dir():
            source = _find(run, name)
            if source is None:
                return False
            work = folder / f".{name}.linking"
            shutil.rmtree(work, ignore_errors=True)
            shutil.copytree(source, work, copy_function=_link_or_copy)
            work.rename(folder / name)
        for other in folder.glob("step_*"):
            if other.name != name:
                shutil.rmtree(other)
        return True


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _find(run: Run, name: str) -> Path | None:
    """Find a checkpoint in this run, or in the one that it continues under another directory."""
    loaded = run.config.run.load
    runs = [run.directory, *([] if loaded is None else [loaded, *list(loaded.absolute().parents)[:2]])]
    places = (each / part / name for each in runs for part in ("checkpoints", FOLDER))
    return next((place for place in places if place.is_dir()), None)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
