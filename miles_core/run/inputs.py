"""Inputs of a run other than its model (prompts, held-out prompts, pairs, functions), and the objects built from them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

from miles_core.config.config import Config
from miles_core.contracts.engine import Engine
from miles_core.contracts.run import Policy, Run
from miles_core.contracts.runtime import PolicyParts, Producer, Runtime
from miles_core.contracts.schedule import Schedule
from miles_core.data.prompt_source import PromptSource, Row
from miles_core.data.prompts import Prompts
from miles_core.data.sample import Sample
from miles_core.errors import ConfigError, DataError
from miles_core.reward.custom import is_async
from miles_core.reward.reward import RewardFunction, load_reward
from miles_core.rollout.collect import Collector, Scorer
from miles_core.rollout.custom_generate import CustomGenerate, load_generate
from miles_core.rollout.evaluate import Evaluator
from miles_core.rollout.filter import GroupFilter, load_filter
from miles_core.rollout.function import TURN, check_roles, to_rollout_function
from miles_core.rollout.generate import Functions, LocalProducer
from miles_core.rollout.queue import FILE, Limits, PromptQueue, RenderRows, encode_rows, examine, open_prompts
from miles_core.run.evaluation import Evaluation
from miles_core.run.log import RunLog
from miles_core.run.metadata_check import MetadataCheck
from miles_core.run.problems import Problems
from miles_core.run.warm_start import supervised_samples


class Inputs:
    """Prompts, held-out prompts, pairs of the warm start, rewards and rollout functions.

    The constructor opens the files and loads the functions; ``check`` validates every row with the run's tokenizer. ``make``
    creates the inputs that plugins provide after the run has started.

    Args:
        config: the run's configuration.
        problems: collects errors, to report them together.
    """

    def __init__(self, config: Config, problems: Problems) -> None:
        self.prompts: PromptSource | None = None
        self.held_out: dict[str, PromptSource] = {}
        self.pairs: Prompts | None = None
        self.supervised: list[Sample] = []
        self.code = RolloutCode(config, problems)
        self.accept: GroupFilter | None = None
        self.limits = Limits()
        self._check_row: Callable[[Row], None] | None = None
        self._starts: dict[int, dict[str, Any]] = {}
        self._names: list[str] = []
        self._from_plugins: list[tuple[str, str, str]] = []  # (data set, name of the source, its argument)
        if config.data.prompts == FILE and config.data.prompt_data:
            with problems():
                self.prompts = open_prompts(config, config.data.prompt_data, "--prompt-data", config.data.shuffle)
        with problems():
            self._open_held_out(config)
        if config.sft.data and config.run.load is None:
            with problems():
                self.pairs = open_prompts(config, config.sft.data, "--sft-data", label_key=config.sft.response_key)
        with problems():
            keep = config.rollout.dynamic_sampling_filter_path
            self.accept = load_filter(keep) if keep else None

    def _open_held_out(self, config: Config) -> None:
        """Open the files of ``--eval-prompt-data``, and record the data sets whose sources plugins provide."""
        options = config.evaluation
        sources = options.prompts or (FILE,)
        sources = sources * len(options.prompt_data) if len(sources) == 1 else sources
        if len(sources) != len(options.prompt_data):
            raise ConfigError(
                f"--eval-prompts {','.join(sources)} names {len(sources)} sources for the {len(options.prompt_data)} data sets of "
                "--eval-prompt-data; give one name for all, or one for each"
            )
        for entry, source in zip(options.prompt_data, sources, strict=True):
            name, _, data = entry.rpartition("=")
            if name in self._names:
                raise ConfigError(f"--eval-prompt-data {entry}: two data sets have the name {name!r}; write NAME=FILE")
            self._names.append(name)
            if source == FILE:
                self.held_out[name] = open_prompts(config, data, "--eval-prompt-data")
            else:
                self._from_plugins.append((name, source, data))

    def check(self, run: Run, problems: Problems) -> None:
        """Render every prompt and pair; collect errors for those that are invalid, too long or outside the vocabulary."""
        config = run.config
        origin = next((f.origin for f in run.plan.facts if f.name == "model.context"), "")
        limits = Limits.of(config, run.plan.fact("model.context"), origin, run.plan.fact("model.vocab_size"))
        with problems():
            if limits.vocabulary is not None and run.tokenizer.eos_token_id >= limits.vocabulary:
                raise ConfigError(
                    f"--hf-checkpoint {config.model.hf_checkpoint}: its tokenizer ends a text with the token "
                    f"{run.tokenizer.eos_token_id}, but the model's vocabulary has {limits.vocabulary} tokens (vocab_size in its "
                    "config.json), so no response could end: tokenizer and model do not match; use the tokenizer of this model"
                )
        self.limits = limits
        # A rollout function or a prompt source may set labels itself.
        own = self.code.generate is not None or config.rollout.generate != TURN or config.data.prompts != FILE
        compare = None if own else _label_check(run, config.reward.rm_type)
        with problems():
            if compare is not None and config.data.label_key is None:
                raise ConfigError(f"--rm-type {config.reward.rm_type} compares with a label: give --label-key COLUMN")
        with problems():
            self.code.check_reward_key(run)
        self._check_row = compare if config.data.label_key else None
        sets = [("--prompt-data", self.prompts), *(("--eval-prompt-data", rows) for rows in self.held_out.values())]
        metadata, before = MetadataCheck(), len(problems.messages)
        for flag, rows in sets:
            with problems():
                if isinstance(rows, Prompts):
                    examine(rows, run.render, config, limits, flag, metadata.counting(self._check_row))
        every = not self._from_plugins and all(isinstance(rows, Prompts) and rows.examined for _, rows in sets)
        if every and len(problems.messages) == before:
            for message in metadata.find_unused(config):
                with problems():
                    raise ConfigError(message)
        with problems():
            if self.pairs is not None:
                self.supervised = supervised_samples(run, self.pairs, limits)

    def make(self, run: Run) -> None:
        """Create the reward, prompt sources and rollout functions that plugins provide. Call it after ``on_start``.

        Raises:
            ConfigError: a source or a rollout function does not fit the run.
            PluginError: no active plugin provides one of them, or a provider returned a wrong type.
        """
        options = run.config
        self.code.make(run)
        if options.data.prompts != FILE:
            self.prompts = _source(run, options.data.prompts, options.data.prompt_data or "", "train")
        for data_set, source, data in self._from_plugins:
            self.held_out[data_set] = made = _source(run, source, data, "evaluation")
            if not made.length:
                raise ConfigError(
                    f"--eval-prompts {source}: the data set {data_set or data!r} has the length {made.length}; evaluation needs a source "
                    "with an end"
                )
        self.held_out = {name: self.held_out[name] for name in self._names}

    @asynccontextmanager
    async def open_schedule(
        self, run: Run, log: RunLog, runtime: Runtime, parts: list[PolicyParts]
    ) -> AsyncIterator[tuple[Schedule, Evaluation]]:
        """Start prompt sources and rollout functions and create the schedule and the evaluation; stop all of them after the body."""
        assert self.prompts is not None  # set by the constructor or ``make``
        engines = {each.policy.name: each.engine for each in parts if each.engine is not None}
        producer = runtime.producer(self.code.producer(run, engines), parts)
        async with AsyncExitStack() as stack:
            sources = [self.prompts, *self.held_out.values()]
            lasting: list[PromptSource | Producer] = [*sources, producer]
            for each in lasting:
                stack.push_async_callback(each.stop)
                await each.start()
            for i, source in enumerate(sources):  # a recovered run without a checkpoint starts from the first prompt
                source.load_state(self._starts.setdefault(i, source.state()))
            kind = run.config.data.prompts
            make_queue = producer.make_queue or PromptQueue
            queue = make_queue(self.prompts, self._render(run), kind, run.hooks.describe_part("prompts", kind))
            collector = Collector(run, queue, producer, log.progress, self.accept)
            name = run.config.run.schedule
            schedule: Schedule = run.hooks.make("schedule", name, run=run, collector=collector, parts=parts)
            stack.push_async_callback(schedule.close)
            progress = None if schedule.beside else log.progress
            evaluator = Evaluator(run, self.held_out, self._render(run), producer, progress) if self.held_out else None
            evaluation = Evaluation(run, log, evaluator, schedule.beside)
            stack.push_async_callback(evaluation.close)
            yield schedule, evaluation

    def _render(self, run: Run) -> RenderRows:
        return encode_rows(run.render, run.config, self.limits, self._check_row)


class RolloutCode:
    """The reward and the rollout functions of a run: users' files and parts of plugins. Rollout workers load them by name.

    The constructor loads the files, ``make`` the parts of plugins.

    Args:
        config: the run's configuration.
        problems: collects errors, to report them together.
    """

    def __init__(self, config: Config, problems: Problems) -> None:
        options = config.reward
        self.reward: RewardFunction | None = None
        self.reward_of: dict[str, RewardFunction] = {}  # policy name -> its own, where the provider takes the policy
        self.generate: Callable[..., Any] | None = None
        self.functions: Functions | None = None
        with problems():
            if options.custom_rm_path is not None:
                self.reward = load_reward(options.custom_rm_path, options.concurrency)
            elif options.rm_type is None:
                raise ConfigError(
                    "no reward is chosen; give --rm-type NAME (`miles train --help reward` lists them) or --custom-rm-path "
                    "f.py[:function]"
                )
        with problems():
            turns = config.rollout.custom_generate_function_path
            self.generate = load_generate(turns) if turns else None

    def make(self, run: Run) -> None:
        """Create the rewards and rollout functions of plugins. Call it after ``on_start``.

        Raises:
            ConfigError, PluginError: see ``Inputs.make``.
        """
        name = run.config.reward.rm_type
        if name is not None and name in run.hooks.find_provided("reward"):
            own = run.hooks.takes("reward", name, "policy")
            learning = [policy for policy in run.policies if policy.role == "train"]
            found = {policy.name: _reward(run, name, policy) for policy in (learning if own else learning[:1])}
            self.reward, self.reward_of = next(iter(found.values())), found if own else {}
        self.functions = _functions(run, self.generate)

    def check_reward_key(self, run: Run) -> None:
        """Refuse ``--reward-key`` for a reward that is a number: one that compares with a label, or that declares ``-> float``.

        Raises:
            ConfigError: the option has no effect.
        """
        options = run.config.reward
        own = self.reward.function if self.reward is not None else None
        declared = getattr(getattr(own, "function", own), "__annotations__", {}).get("return")
        if options.reward_key and (declared in (float, "float") or _label_check(run, options.rm_type) is not None):
            name = f"--rm-type {options.rm_type}" if options.rm_type else f"--custom-rm-path {options.custom_rm_path}"
            raise ConfigError(
                f"--reward-key {options.reward_key}: it has no effect, because the reward of {name} is a number, and only a dict has entries; "
                "leave --reward-key out"
            )

    def producer(self, run: Run, engines: Mapping[str, Engine]) -> LocalProducer:
        """Return the producer of this process; ``engines`` maps the policies that generate to their engines."""
        assert self.reward is not None and self.functions is not None  # set by the constructor or ``make``
        return LocalProducer(run, engines, self.functions, Scorer(run, self.reward, self.reward_of))


def _label_check(run: Run, name: str | None) -> Callable[[Row], None] | None:
    """The check of a row's label, if the reward of this name compares a response with a label."""
    if name is None or name not in run.hooks.find_provided("reward"):
        return None
    check: Callable[[Any], object] | None = getattr(run.hooks.builder("reward", name)[1], "check_label", None)
    if check is None:
        return None

    def check_row(row: Row) -> None:
        try:
            check(row.label)
        except DataError as error:
            raise DataError(f"{row.place}: {error} (--label-key {run.config.data.label_key})") from error

    return check_row


def _reward(run: Run, name: str, policy: Policy) -> RewardFunction:
    """The reward that a plugin provides."""
    made = run.hooks.make("reward", name, run=run, policy=policy)
    how: Literal["async", "thread"] = "async" if is_async(made) else "thread"
    return RewardFunction(made, name, f"--rm-type {name}", how, run.config.reward.concurrency)


def _source(run: Run, name: str, data: str, purpose: str) -> PromptSource:
    made: PromptSource = run.hooks.make("prompts", name, run=run, data=data, purpose=purpose)
    return made


def _functions(run: Run, custom: Callable[..., Any] | None) -> Functions:
    """Create the rollout functions of a run and check their roles against the chat template."""

    options = run.config.rollout
    named = options.custom_generate_function_path
    wanted = run.hooks.find_provided("generate") if options.generate_key else (options.generate,)
    made = {
        name: to_rollout_function(run.hooks.make("generate", name, run=run), run.hooks.describe_part("generate", name))
        for name in wanted
    }
    if custom is not None:
        made[str(named)] = CustomGenerate(custom, run.config.args)
    for name, function in made.items():
        check_roles(run, name, function)
    return Functions(str(named) if custom is not None else options.generate, made, options.generate_key or "")
