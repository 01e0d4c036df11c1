"""Recovers a run after the loss of a worker that held training state."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from miles_core.checkpoint.directory import Checkpoints, checkpoint_step
from miles_core.checkpoint.rng import seed_generators
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Runtime
from miles_core.errors import WorkerLost
from miles_core.run.log import RunLog
from miles_core.run.parts import await_unless_stopped

log = logging.getLogger(__name__)


async def recover(
    run: Run, run_log: RunLog, runtime: Runtime, lost: WorkerLost, resume_from: Path | None
) -> Path | None:
    """Let the runtime rebuild the lost worker, and reset the run to its last checkpoint or to its start.

    Args:
        resume_from: the checkpoint from which this run started; None if it did not resume.

    Returns:
        the checkpoint to continue from; None if there is none and the run starts again.

    Raises:
        WorkerLost: the runtime cannot rebuild the worker.
        Interrupted: the user requested a stop. The lost worker's weights are gone, so the run ends at its last checkpoint.
    """
    await await_unless_stopped(run, runtime.recover(lost))
    own = Checkpoints(run.directory / "checkpoints")
    last = await asyncio.to_thread(own.load) if own.find_latest() is not None else resume_from
    at, run.step = run.step, checkpoint_step(last) if last is not None else 0
    if last is None:
        seed_generators(run.config.train.seed)
    for policy in run.policies:
        policy.version, policy.trained = -1, 0
    run_log.roll_back(run.step if last is not None else -1)  # -1 also drops the warm start, which is repeated
    log.warning(
        "%s was replaced at step %d; the run continues from step %d (%s)",
        lost.worker,
        at,
        run.step,
        last or "its start",
    )
    return last
