"""The training loop.

One step takes groups of samples, learns from them and syncs the new weights to the engine. The schedule decides when, and with
which weights, the groups are generated. ``miles_core.contracts.hooks`` lists the hooks through which plugins change the loop.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts, Runtime
from miles_core.contracts.schedule import Schedule
from miles_core.errors import OutOfTime, WorkerLost
from miles_core.rollout.collect import Interrupted, rollout_metrics
from miles_core.run.checkpoints import RunCheckpoints
from miles_core.run.evaluation import Evaluation
from miles_core.run.inputs import Inputs
from miles_core.run.log import RunLog, TrainedSamples
from miles_core.run.parts import build_parts, notify_plugins, runtime_of
from miles_core.run.recovery import recover
from miles_core.run.warm_start import warm_start
from miles_core.sync.push import check_synced, push, stage, switch_is_due, switch_when_due

#: Fraction of ``--stop-within`` reserved for saving the last completed step after the current step is cancelled.
SAVE = 0.3


async def train(run: Run, log: RunLog, inputs: Inputs, resume_from: Path | None = None) -> list[PolicyParts]:
    """Run until ``--num-rollout`` steps are complete or the user requests a stop. Returns the released parts of each policy."""
    parts: list[PolicyParts] = []
    with notify_plugins(run, log.hints.known):  # on_start ... on_stop
        inputs.make(run)
        runtime = runtime_of(run)
        async with build_parts(run, runtime) as parts:
            log.watch(runtime)
            while True:
                try:
                    await steps(run, log, inputs, runtime, parts, resume_from)
                    break
                except WorkerLost as lost:
                    resume_from = await recover(run, log, runtime, lost, resume_from)
    return parts


async def steps(
    run: Run, log: RunLog, inputs: Inputs, runtime: Runtime, parts: list[PolicyParts], resume_from: Path | None
) -> None:
    """Run all remaining steps, starting from a checkpoint if ``resume_from`` is set."""
    async with inputs.open_schedule(run, log, runtime, parts) as (schedule, evaluation):
        checkpoints = RunCheckpoints(run, parts, schedule, resume_from)
        resumed = await checkpoints.resume()
        if not resumed:
            await warm_start(run, parts, log, inputs.supervised)
        try:
            for part in parts:
                if part.engine is not None:
                    lasting = resumed and not part.policy.learns  # weights that no step changed keep their version
                    await sync(run, schedule, part, part.policy.version if lasting else run.step)
            if missing := await evaluation.run_if_missing(resume_from):
                log.record(run.step, missing)
            log.begin(run)  # no step includes the time to build the parts
            while run.step < run.config.rollout.num_rollout and not run.stop_requested:
                try:
                    await step(run, log, parts, schedule, evaluation)
                    await checkpoints.commit()
                except Interrupted:
                    checkpoints.roll_back()
            await evaluation.complete_unless_stopped()
            await checkpoints.complete()
        except (asyncio.CancelledError, OutOfTime):  # the time limit after a signal has passed
            with suppress(TimeoutError):
                async with asyncio.timeout(run.config.run.stop_within * SAVE):
                    await runtime.release()
                    await checkpoints.rescue()
            raise
        except WorkerLost as lost:
            if not runtime.recovers(lost):
                await checkpoints.rescue()
            raise
        except Exception:
            await checkpoints.rescue()
            raise
        finally:
            await checkpoints.close()
        await checkpoints.finish()


async def step(run: Run, log: RunLog, parts: list[PolicyParts], schedule: Schedule, evaluation: Evaluation) -> None:
    """Run one step. An interrupted rollout changes no state.

    - consumes: the groups of the step, from the schedule.
    - waits: for these groups; for ``learn`` of each trained policy; for an evaluation that uses the weights to be replaced; for the pushes.
    - unblocks: the schedule's requests, when each engine has the new weights; the checkpoint of the step, when this function returns.
    """
    metrics: dict[str, float] = {}
    with log.step(run):
        with run.clock.phase("rollout"):
            options = run.config.rollout
            log.progress.phase("rollout", total=options.batch_size * options.n_samples_per_prompt)
            groups = await schedule.take(run.step)
        metrics |= rollout_metrics(run, groups) | schedule.metrics()
        log.progress.phase("train")
        trained: TrainedSamples = []
        for part in parts:
            part.learner.learned = None
        for part in parts:
            if part.policy.role == "train":
                own = run.select_policy(part.policy, groups)
                learned = await (part.learn or part.learner.learn)(own, run.step)
                trained += zip_longest(own, learned.tokens)
                metrics |= run.prefix_metrics(part.policy, learned.metrics)
        for part in parts:
            if part.policy.role == "critic" and part.learner.learned is not None:
                metrics |= run.prefix_metrics(part.policy, part.learner.learned.metrics)
        run.step += 1
        await log.record_trained(run.step, trained)
        log.progress.phase("sync")
        await evaluation.complete()  # before the sync replaces the weights being evaluated
        for part in parts:
            if part.engine is not None and (part.policy.learns or part.learner.unsynced):
                metrics |= run.prefix_metrics(part.policy, await sync(run, schedule, part, run.step))
    metrics |= run.clock.metrics() | log.workers()
    if schedule.seconds:
        metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / schedule.seconds
    metrics |= await evaluation.run_if_due()
    run.hooks.on("on_step", run=run, metrics=metrics)
    log.record(run.step, metrics)


async def sync(run: Run, schedule: Schedule, parts: PolicyParts, version: int) -> dict[str, float]:
    """Push the learner's weights to the engine as ``version``, the number of steps that made them; returns metrics.

    If a precision switch is due at this step, it happens before the push.
    """
    policy = parts.policy
    with run.clock.phase("sync"):
        if not switch_is_due(run, parts):
            await stage(parts, version)
        async with schedule.pause_for_push(parts):
            await switch_when_due(run, parts)
            report = await push(parts, version)
    policy.version = report.version
    metrics = {"sync/bytes": report.nbytes, "sync/gb_per_second": report.nbytes / max(report.seconds, 1e-9) / 1e9}
    metrics |= {f"sync/{name}": value for name, value in report.metrics.items()}
    return metrics | await check_synced(run, parts)
