"""What a run is built of: the parts of each policy, and the functions that a step calls."""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from miles_core.contracts.engine import Sampling
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts, Runtime
from miles_core.contracts.schedule import Schedule
from miles_core.data.sample import Sample
from miles_core.observe.hints import for_error
from miles_core.observe.progress import Progress
from miles_core.plugin.chain import compose
from miles_core.plugin.hint import Hint
from miles_core.reward.reward import RewardFunction, make_reward, score
from miles_core.rollout.collect import Collector, Interrupted, Pairs, Score
from miles_core.rollout.evaluate import Evaluator
from miles_core.rollout.filter import load_filter
from miles_core.rollout.generate import Generate, Generator, load_generate
from miles_core.rollout.queue import PromptQueue
from miles_core.rollout.sampling import evaluation_sampling, training_sampling
from miles_core.rollout.source import prompt_source
from miles_core.run.evaluation import Evaluation
from miles_core.run.log import RunLog

log = logging.getLogger(__name__)


@contextmanager
def told(run: Run, hints: Iterable[Hint]) -> Iterator[None]:
    """``on_start`` before and ``on_stop`` after the body, with the error that ended it; what helps against it is logged."""
    error: BaseException | None = None
    try:
        run.hooks.on("on_start", run=run)
        yield
    except Interrupted:
        log.info("stopped before the first step: nothing was trained that could be kept")
    except BaseException as caught:
        error = caught
        if hint := for_error(caught, hints):
            log.error("%s", hint)
        raise
    finally:
        run.hooks.on("on_stop", run=run, error=error)


def runtime_of(run: Run) -> Runtime:
    """The run's runtime, which has built nothing yet."""
    made: Runtime = run.hooks.make("runtime", run.config.run.runtime, run=run)
    return made


@asynccontextmanager
async def built(run: Run, runtime: Runtime | None = None) -> AsyncIterator[list[PolicyParts]]:
    """Learner and engine of every policy, made by a runtime (the run's by default) and released in every case."""
    runtime = runtime or runtime_of(run)
    try:
        parts = [await runtime.build(policy) for policy in run.policies]
        # A full collection looks at every object of every imported module, tenths of a second each few steps.
        gc.collect()
        gc.freeze()
        yield parts
    finally:
        gc.unfreeze()
        await runtime.close()


class Inputs:
    """What a run reads beside its model: prompts and the reward. Made first, because it is cheap and often wrong."""

    def __init__(self, run: Run) -> None:
        self.reward = _reward(run)
        self.prompts = PromptQueue(
            prompt_source(run.config, run.render, run.config.data.prompt_data, "--prompt-data"), run.render
        )

    @asynccontextmanager
    async def scheduled(
        self, run: Run, log: RunLog, parts: list[PolicyParts]
    ) -> AsyncIterator[tuple[Schedule, Evaluation]]:
        """Who says when samples are generated and when held-out prompts are scored; both are stopped in every case."""
        schedule: Schedule = run.hooks.make(
            "schedule", run.config.run.schedule, run=run, collector=self._collector(run, log, parts), parts=parts
        )
        evaluator = self._evaluator(run, None if schedule.beside else log.progress, parts)
        evaluation = Evaluation(run, log, evaluator, schedule.beside)
        try:
            yield schedule, evaluation
        finally:
            await evaluation.close()
            await schedule.close()

    def _collector(self, run: Run, log: RunLog, parts: list[PolicyParts]) -> Collector:
        path = run.config.rollout.dynamic_sampling_filter_path
        accept = load_filter(path) if path else None
        answers: Pairs = {}
        generate, score = self._generation(run, parts, training_sampling(run.config), answers)

        async def abort(keys: Collection[int]) -> None:
            for each in parts:
                await each.engine.abort(keys)

        return Collector(run, self.prompts, generate, score, abort, log.progress, accept, answers)

    def _evaluator(self, run: Run, progress: Progress | None, parts: list[PolicyParts]) -> Evaluator | None:
        if not run.config.evaluation.prompt_data:
            return None
        return Evaluator(run, *self._generation(run, parts, evaluation_sampling(run.config)), progress)

    def _generation(
        self, run: Run, parts: list[PolicyParts], sampling: Sampling, answers: Pairs | None = None
    ) -> tuple[Generate, Score]:
        path = run.config.rollout.custom_generate_function_path
        generate = compose(
            Generator(run, parts[0].engine, sampling, load_generate(path) if path else None, answers),
            run.hooks.chain("wrap_generate", run=run),
        )

        async def score_all(samples: list[Sample]) -> None:
            await score(samples, self.reward, run.config.args)

        return generate, score_all


def _reward(run: Run) -> RewardFunction:
    options = run.config.reward
    if options.rm_type in run.hooks.provided("reward"):
        made = run.hooks.make("reward", options.rm_type, run=run)
        return RewardFunction(made, options.rm_type, f"--rm-type {options.rm_type}", "async")
    return make_reward(options.rm_type, options.custom_rm_path, options.rm_url)
