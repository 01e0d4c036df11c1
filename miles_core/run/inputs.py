"""What a run reads beside its model (prompts, held-out prompts, pairs, functions), and the parts of a step made of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

from miles_core.config.config import Config
from miles_core.contracts.engine import Sampling
from miles_core.contracts.run import Run
from miles_core.contracts.runtime import PolicyParts
from miles_core.contracts.schedule import Schedule
from miles_core.data.prompts import Prompts, Row
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, DataError
from miles_core.observe.progress import Progress
from miles_core.plugin.chain import compose
from miles_core.reward.reward import LABELLED, RM_TYPES, RewardFunction, make_reward, score
from miles_core.reward.rules import labels_of
from miles_core.rollout.collect import Collector, Pairs, Score
from miles_core.rollout.evaluate import Evaluator
from miles_core.rollout.filter import GroupFilter, load_filter
from miles_core.rollout.generate import Generate, Generator, load_generate
from miles_core.rollout.queue import PromptQueue
from miles_core.rollout.sampling import evaluation_sampling, training_sampling
from miles_core.rollout.source import Limits, examine, open_prompts
from miles_core.run.evaluation import Evaluation
from miles_core.run.log import RunLog
from miles_core.run.problems import Problems
from miles_core.run.warm_start import open_pairs, supervised_samples


class Inputs:
    """Prompts, held-out prompts, pairs of the warm start, and the user's functions.

    Making it opens the files and loads the functions; ``check`` looks at every row with the run's tokenizer. Rewards that a plugin
    provides are made later, when the run has begun.

    Args:
        config: of the run.
        problems: takes what is wrong, so that all of it is told together.
    """

    def __init__(self, config: Config, problems: Problems) -> None:
        options, rollout = config.reward, config.rollout
        self.prompts: Prompts | None = None
        self.held_out: dict[str, Prompts] = {}
        self.pairs: Prompts | None = None
        self.supervised: list[Sample] = []
        self.reward: RewardFunction | None = None
        self.generate: Callable[..., Any] | None = None
        self.accept: GroupFilter | None = None
        if config.data.prompt_data:
            with problems():
                self.prompts = open_prompts(config, config.data.prompt_data, "--prompt-data")
                self._first = self.prompts.state()
        for entry in config.evaluation.prompt_data:
            with problems():
                name, _, path = entry.rpartition("=")
                if name in self.held_out:
                    raise ConfigError(
                        f"--eval-prompt-data {entry}: two data sets have the name {name!r}; write NAME=FILE"
                    )
                self.held_out[name] = open_prompts(config, path, "--eval-prompt-data")
        if config.sft.data and config.run.load is None:
            with problems():
                self.pairs = open_pairs(config)
        with problems():
            if options.rm_type is None or options.rm_type in RM_TYPES or options.custom_rm_path is not None:
                self.reward = make_reward(options.rm_type, options.custom_rm_path, options.rm_url)
        with problems():
            turns = rollout.custom_generate_function_path
            self.generate = load_generate(turns) if turns else None
        with problems():
            keep = rollout.dynamic_sampling_filter_path
            self.accept = load_filter(keep) if keep else None

    def check(self, run: Run, problems: Problems) -> None:
        """Render every prompt and pair: none may be refused, too long, or in tokens that the model does not have."""
        config = run.config
        origin = next((f.origin for f in run.plan.facts if f.name == "model.context"), "")
        limits = Limits.of(config, run.plan.fact("model.context"), origin, run.plan.fact("model.vocab_size"))
        with problems():
            if limits.vocabulary is not None and run.tokenizer.eos_token_id >= limits.vocabulary:
                raise ConfigError(
                    f"--hf-checkpoint {config.model.hf_checkpoint}: its tokenizer ends a text with the token "
                    f"{run.tokenizer.eos_token_id}, and the model knows {limits.vocabulary} (vocab_size in its config.json), so no "
                    "response could end: tokenizer and model do not belong together"
                )
        # A generate function may set labels of its own.
        label = None if config.reward.rm_type not in LABELLED or self.generate is not None else _check_label
        with problems():
            if label is not None and config.data.label_key is None:
                raise ConfigError(f"--rm-type {config.reward.rm_type} compares with a label: give --label-key COLUMN")
        label = label if config.data.label_key else None
        sets = [("--prompt-data", self.prompts), *(("--eval-prompt-data", rows) for rows in self.held_out.values())]
        for flag, rows in sets:
            with problems():
                if rows is not None:
                    examine(rows, run.render, config, limits, flag, label)
        with problems():
            if self.pairs is not None:
                self.supervised = supervised_samples(run, self.pairs, limits)

    def make_reward(self, run: Run) -> None:
        """Make the reward that a plugin provides; it may count on ``on_start``."""
        name = run.config.reward.rm_type
        if name is not None and name in run.hooks.provided("reward"):
            made = run.hooks.make("reward", name, run=run)
            self.reward = RewardFunction(made, name, f"--rm-type {name}", "async")

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
        assert self.prompts is not None  # checked
        answers: Pairs = {}
        generate, score = self._generation(run, parts, training_sampling(run.config), answers)

        async def abort(keys: Collection[int]) -> None:
            for each in parts:
                await each.engine.abort(keys)

        self.prompts.load_state(self._first)  # a run that lost its work and has no checkpoint begins again
        queue = PromptQueue(self.prompts, run.render)
        return Collector(run, queue, generate, score, abort, log.progress, self.accept, answers)

    def _evaluator(self, run: Run, progress: Progress | None, parts: list[PolicyParts]) -> Evaluator | None:
        if not self.held_out:
            return None
        return Evaluator(run, self.held_out, *self._generation(run, parts, evaluation_sampling(run.config)), progress)

    def _generation(
        self, run: Run, parts: list[PolicyParts], sampling: Sampling, answers: Pairs | None = None
    ) -> tuple[Generate, Score]:
        generate = compose(
            Generator(run, parts[0].engine, sampling, self.generate, answers),
            run.hooks.chain("wrap_generate", run=run),
        )

        reward = self.reward
        assert reward is not None  # checked, or made

        async def score_all(samples: list[Sample]) -> None:
            await score(samples, reward, run.config.args)

        return generate, score_all


def _check_label(row: Row) -> None:
    try:
        labels_of(row.label)
    except DataError as error:
        raise DataError(f"{row.place}: {error}") from error
