"""Going on after a worker was lost that took the learner's work with it."""

from __future__ import annotations

import logging
from pathlib import Path

from miles_core.checkpoint.directory import Checkpoints, checkpoint_step
from miles_core.checkpoint.rng import seed_generators
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import Runtime
from miles_core.errors import WorkerLost
from miles_core.run.log import RunLog
from miles_core.run.parts import unless_stopped

log = logging.getLogger(__name__)


async def recover(run: Run, told: RunLog, runtime: Runtime, lost: WorkerLost, resume_from: Path | None) -> Path | None:
    """Have the runtime rebuild what was lost, and take the run back to where its steps are repeated from.

    Args:
        resume_from: what the run itself began with.

    Returns:
        the last checkpoint; None where there is none and the run starts anew.

    Raises:
        WorkerLost: nothing can be rebuilt.
        Interrupted: the user asked to stop, and the lost worker's weights are gone: the run ends at its last checkpoint.
    """
    await unless_stopped(run, runtime.recover(lost))
    own = Checkpoints(run.directory / "checkpoints")
    last = own.load() if own.latest() is not None else resume_from
    at, run.step = run.step, checkpoint_step(last) if last is not None else 0
    if last is None:
        seed_generators(run.config.train.seed)
    for policy in run.policies:
        policy.version, policy.trained = -1, 0
    told.roll_back(run.step if last is not None else -1)  # a warm start is made again too
    log.warning(
        "%s was replaced at step %d; the run goes on from step %d (%s)", lost.worker, at, run.step, last or "its start"
    )
    return last
