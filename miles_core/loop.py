"""The loop. Everything a plugin can change is a line that mentions a hook.

One step: roll out groups of samples, learn from them, sync the new weights to the engine. The synchronous schedule is the only
one here, so a step's samples always come from the weights of the step before. ``miles_core.contracts.hooks`` is the map.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from miles_core.contracts.policy import Policy
from miles_core.mismatch.at_sync import verify
from miles_core.observe.hints import for_error
from miles_core.plugin.load import compose
from miles_core.precision.schedule import follow
from miles_core.rollout.collect import Group, Interrupted
from miles_core.rollout.evaluate import Evaluator
from miles_core.rollout.summary import rollout_metrics
from miles_core.run.run import Run
from miles_core.run.warm_start import warm_start
from miles_core.train.steps import optimiser_steps

log = logging.getLogger(__name__)

Rollout = Callable[[int], Awaitable[list[Group]]]


async def train(run: Run) -> None:
    """Run until ``--num-rollout`` steps are complete or the user asks to stop."""
    error: BaseException | None = None
    try:
        run.hooks.on("on_start", run=run)
        await run.build()
        if not await run.resume():
            await warm_start(run)
        for policy in run.policies:
            await sync(run, policy)
        rollout = compose(run.collector().rollout, run.hooks.chain("wrap_rollout", run=run))
        evaluator = run.evaluator()
        if run.step == 0 and (found := await evaluate(run, evaluator)):
            run.record(0, found)
        run.clock.metrics()  # building the parts is no step's time
        while run.step < run.config.rollout.num_rollout and not run.stop_requested:
            try:
                await step(run, rollout, evaluator)
            except Interrupted:
                run.roll_back()
        await run.finish()
    except Interrupted:
        log.info("stopped before the first step: nothing was trained that could be kept")
    except BaseException as caught:
        error = caught
        if hint := for_error(caught):
            log.error("%s", hint)
        raise
    finally:
        run.hooks.on("on_stop", run=run, error=error)
        await run.close()


async def step(run: Run, rollout: Rollout, evaluator: Evaluator | None) -> None:
    """One step, complete or not at all: an interrupted rollout leaves nothing behind."""
    metrics: dict[str, float] = {}
    with run.profiler.step(run.step), run.clock.phase("other"):
        with run.clock.phase("rollout"):
            options = run.config.rollout
            run.progress.phase("rollout", total=options.batch_size * options.n_samples_per_prompt)
            groups = await rollout(run.step)
        metrics |= rollout_metrics(run, groups)
        for policy in run.policies:
            run.progress.phase("train")
            samples = policy.own(groups)
            metrics |= run.named(policy, await policy.learner.learn(samples))
            policy.trained += optimiser_steps(samples, run.config.train)[1]
            run.progress.phase("sync")
        run.step += 1
        for policy in run.policies:
            metrics |= run.named(policy, await sync(run, policy))
    metrics |= run.clock.metrics()
    metrics["rollout/tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/rollout"]
    metrics |= await evaluate(run, evaluator)
    run.hooks.on("on_step", run=run, metrics=metrics)
    await run.complete_step(groups, metrics)


async def sync(run: Run, policy: Policy) -> dict[str, float]:
    """Give the engine the learner's weights as version ``run.step``, in the precision that is due."""
    with run.clock.phase("sync"):
        await follow(run, policy)
        report = await policy.learner.push(run.step)
    policy.version = report.version
    run.hooks.on("on_weights_synced", run=run, policy=policy, version=report.version)
    metrics = {"sync/bytes": report.nbytes, "sync/gb_per_second": report.nbytes / max(report.seconds, 1e-9) / 1e9}
    return metrics | await verify(run, policy)


async def evaluate(run: Run, evaluator: Evaluator | None) -> dict[str, float]:
    """Score the held-out prompts every ``--eval-interval`` steps, before the first and after the last."""
    interval = run.config.evaluation.interval
    if evaluator is None or not interval or run.stop_requested:
        return {}
    if run.step % interval and run.step < run.config.rollout.num_rollout:
        return {}
    with run.clock.phase("evaluation"):
        return await evaluator()
