"""``--schedule offline``: the samples of a step are the next rows of the data. Policies of such a run have no engines."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from miles_core.data import Sample
from miles_core.plugin import DataError, PolicyParts, Position, Run, Schedule, StateKey
from miles_offline.encode import Encoder
from miles_offline.rows import OfflineRows, open_rows

log = logging.getLogger(__name__)

#: Rows of a large file that are encoded before the model is built; of other files all are.
_EXAMINED = 10_000
#: The samples of ``--held-out-data``, in the driver.
HELD_OUT = StateKey[list[Sample]]()


def make_prompts(run: Run, data: str, purpose: str) -> OfflineRows:
    """``--prompts offline``: open training and held-out rows, and encode them, so that a defect is reported before the model is built."""
    rows, encoder = open_rows(run, data), Encoder(run)
    for number in range(len(rows) if rows.examined else _EXAMINED):
        encoder.encode(rows[number], 0, 0)
    held_out: list[Sample] = []
    if path := run.config.plugin("offline").held_out:
        for number, row in enumerate(open_rows(run, path, train=False)):
            held_out += encoder.encode(row, number, len(held_out))
        if run.config.algorithm.advantage_estimator == "kto" and len({sample.reward for sample in held_out}) < 2:
            raise DataError(
                f"--held-out-data {path}: all rows have the same label, and kto's accuracy compares both; add rows with the other one"
            )
    run.state[HELD_OUT] = held_out
    return rows


class OfflineSchedule(Schedule):
    """Takes ``--rollout-batch-size`` rows in each step.

    - consumes: rows of ``--prompt-data``.
    - waits: for nothing; there is no engine.
    - unblocks: training, when the rows are encoded.
    """

    generates = False

    def __init__(self, run: Run, collector: Any) -> None:
        self.run, self.rows, self.encoder = run, collector.prompts.source, Encoder(run)
        self.group = self.sample = 0

    async def take(self, step: int) -> list[list[Sample]]:
        groups: list[list[Sample]] = []
        count = self.run.config.rollout.batch_size
        while len(groups) < count:
            for row in self.rows.next(count - len(groups)):
                try:
                    if row.fault:
                        raise DataError(row.fault)
                    groups.append(self.encoder.encode(row, self.group, self.sample))
                except DataError as error:
                    if row.examined:
                        raise
                    log.warning("%s. The row is left out", error)
                else:
                    self.group, self.sample = self.group + 1, self.sample + len(groups[-1])
        return groups

    @asynccontextmanager
    async def pause_for_push(self, parts: PolicyParts) -> AsyncIterator[None]:
        yield

    def metrics(self) -> dict[str, float]:
        return {"offline/epoch": float(self.rows.epoch)}

    def state(self) -> Position:
        return Position({"offline": {"rows": self.rows.state(), "group": self.group, "sample": self.sample}})

    def load_state(self, position: Position) -> None:
        """Raises DataError for the position of a run that generated its samples."""
        if "offline" not in position.data:
            raise DataError(
                "cannot resume: the checkpoint is of a run that generated its samples; start from its exported weights"
            )
        saved = position.data["offline"]
        self.rows.load_state(saved["rows"])
        self.group, self.sample = saved["group"], saved["sample"]

    async def close(self) -> None:
        """Nothing is in flight."""


def make_reward() -> Any:
    """``--rm-type preference``: the reward that the data states, 1 for what is trained or preferred and 0 for the rejected side."""

    async def preference(args: object, sample: Sample) -> Any:
        return sample.reward

    return preference
