"""A run: the accepted plan, the parts built from it, and the directory it lives in."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.checkpoint.directory import Checkpoints, Store
from miles_core.checkpoint.rng import get_rng, put_rng
from miles_core.contracts.policy import Policy
from miles_core.data.field import Field
from miles_core.data.prompts import Prompts, check_lengths, drop_long
from miles_core.data.sample import Sample
from miles_core.data.template import PromptTemplate
from miles_core.errors import CheckpointError, ConfigError
from miles_core.observe.hints import Hints
from miles_core.observe.metrics import MetricLog
from miles_core.observe.progress import Progress
from miles_core.observe.timer import Clock, Profiler
from miles_core.plugin.load import Hooks, compose
from miles_core.reward.reward import RewardFunction, make_reward, score
from miles_core.rollout.collect import Collector, Group, Score
from miles_core.rollout.evaluate import Evaluator
from miles_core.rollout.filter import load_filter
from miles_core.rollout.generate import Generate, Generator, load_generate
from miles_core.rollout.queue import PromptQueue
from miles_core.rollout.sampling import evaluation_sampling, training_sampling
from miles_core.stash import Stash

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.contracts.engine import Sampling
    from miles_core.contracts.runtime import Runtime
    from miles_core.plugin.plan import Plan


log = logging.getLogger(__name__)


class Run:
    """Shared by core and plugins; plugins hang their own state on ``stash``.

    Attributes:
        config, plan, hooks: what was asked for, what was resolved, who is told.
        directory: where everything of this run is written.
        resume_from: a verified checkpoint to continue from.
        fields: declared columns of core and the active plugins.
        policies: one by default.
        prompts: the queue of prompts; tokenizer: the checkpoint's.
        step: completed steps; during a step, the number of the step under way.
        stop_requested: the user asked to stop; honoured at once during a rollout, else after the step.
        clock, progress, metrics, profiler: observation.
        stash: typed plugin state.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        hooks: Hooks,
        fields: tuple[Field, ...],
        directory: Path,
        resume_from: Path | None = None,
    ) -> None:
        self.config, self.plan, self.hooks, self.fields, self.directory = config, plan, hooks, fields, directory
        self.resume_from = resume_from
        self.stash = Stash()
        self.step = 0
        self.stop_requested = False
        self.clock = Clock()
        self.policies = [Policy(hf_checkpoint=config.model.hf_checkpoint or "")]
        self.checkpoints = Checkpoints(directory / "checkpoints")
        options = config.run
        self.profiler = Profiler(options.profile_dir or directory / "profile", count=int(options.profile))
        self.progress = Progress(config.rollout.num_rollout)
        self.metrics: MetricLog
        self.runtime: Runtime
        self.tokenizer: Any = None
        self.render: PromptTemplate
        self.reward: RewardFunction
        self.prompts: PromptQueue
        self.hints = Hints(facts={fact.name: fact.value for fact in config.facts()})
        self._committed: dict[str, Any] = {}
        self._saved: int | None = None

    @property
    def policy(self) -> Policy:
        """The policy of a run that has one."""
        return self.policies[0]

    async def build(self) -> None:
        """Make the parts: tokenizer, prompts, and each policy's learner and engine through the runtime."""
        self._open()
        self.reward = self._reward()
        self.prompts = PromptQueue(self.prompt_source(self.config.data.prompt_data, "--prompt-data"), self.render)
        await self._build_policies()
        self._commit()
        # A full collection looks at every object of every imported module, tenths of a second each few steps.
        gc.collect()
        gc.freeze()

    async def build_policies(self) -> None:
        """The tokenizer and the policies' parts alone, for tools that neither need prompts nor a reward."""
        self._open()
        await self._build_policies()

    def _open(self) -> None:
        self.tokenizer = load_tokenizer(self.config.model)
        self.render = PromptTemplate(self.tokenizer, self.config.data.apply_chat_template)

    async def _build_policies(self) -> None:
        self.runtime = self.hooks.make("runtime", self.config.run.runtime, run=self)
        for policy in self.policies:
            await self.runtime.build(policy)

    def collector(self) -> Collector:
        """The innermost rollout: collects the groups of a step."""
        options = self.config.rollout
        keep = load_filter(options.dynamic_sampling_filter_path) if options.dynamic_sampling_filter_path else None
        generate, score = self._generation(training_sampling(self.config))
        return Collector(self, generate, score, keep)

    def evaluator(self) -> Evaluator | None:
        """Scores the held-out prompts; None when there are none."""
        if not self.config.evaluation.prompt_data:
            return None
        return Evaluator(self, *self._generation(evaluation_sampling(self.config)))

    def prompt_source(self, paths: Any, flag: str) -> Prompts:
        """The rows of ``paths``, checked against the context length."""
        data, options = self.config.data, self.config.rollout
        if not paths:
            raise ConfigError(f"no prompts: give {flag} FILE (JSONL or parquet)")
        source = Prompts(
            paths,
            input_key=data.input_key,
            label_key=data.label_key,
            metadata_key=data.metadata_key,
            shuffle=data.shuffle,
            seed=self.config.train.seed,
        )
        if options.max_prompt_len:
            dropped = drop_long(source, self.render, options.max_prompt_len)
            if dropped:
                log.info("%s: %d prompts are longer than --rollout-max-prompt-len and left out", flag, dropped)
        if options.max_context_len:
            check_lengths(source, self.render, options.max_context_len - 1, "--rollout-max-context-len")
        return source

    def _generation(self, sampling: Sampling) -> tuple[Generate, Score]:
        path = self.config.rollout.custom_generate_function_path
        assert self.policy.engine is not None
        generate = compose(
            Generator(self, self.policy.engine, sampling, load_generate(path) if path else None),
            self.hooks.chain("wrap_generate", run=self),
        )

        async def score_all(samples: list[Sample]) -> None:
            await score(samples, self.reward, self.config.args)

        return generate, score_all

    def _reward(self) -> RewardFunction:
        options = self.config.reward
        if options.rm_type in self.hooks.provided("reward"):
            made = self.hooks.make("reward", options.rm_type, run=self)
            return RewardFunction(made, options.rm_type, f"--rm-type {options.rm_type}", "async")
        return make_reward(options.rm_type, options.custom_rm_path, options.rm_url)

    def named(self, policy: Policy, metrics: dict[str, float]) -> dict[str, float]:
        """Metrics of one policy, prefixed when there are several."""
        return metrics if len(self.policies) == 1 else {f"{policy.name}/{k}": v for k, v in metrics.items()}

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Write metrics of ``step`` to the log and show them."""
        finite = self.metrics.append(step, metrics)
        self.progress.step(finite, done=step)
        for hint in self.hints.of(metrics, step):
            log.warning("%s", hint)

    async def complete_step(self, groups: list[Group], metrics: dict[str, float]) -> None:
        """Commit the step: metrics, examples, checkpoint when it is due."""
        self._commit()
        self.record(self.step, metrics)
        self._write_examples(groups)
        interval = self.config.run.save_interval
        if interval and self.step % interval == 0:
            await self.save()

    def roll_back(self) -> None:
        """Forget an unfinished rollout: the run stands where the last completed step left it."""
        log.info("interrupted: the unfinished rollout is dropped; the run stands at step %d", self.step)
        self.prompts.load_state(self._committed["prompts"])

    async def finish(self) -> None:
        """Write what a finished or interrupted run leaves behind."""
        if self._saved != self.step:
            await self.save()
        if self.config.run.export_hf:
            await self.policy.learner.export(Path(self.config.run.export_hf))

    async def save(self) -> None:
        """Write the checkpoint of the last completed step."""
        with self.clock.phase("save"), self.checkpoints.save(self.step, json.loads(self.plan.to_json())) as directory:
            for policy in self.policies:
                await policy.learner.save(directory / policy.name)
            store = Store(directory / "state")
            trained = {policy.name: policy.trained for policy in self.policies}
            store.put("run", data={"step": self.step, "trained": trained, **self._committed})
            put_rng(store)
            self.hooks.on("on_save", run=self, policy=None, store=store)
        self._saved = self.step

    async def resume(self) -> bool:
        """Continue from the checkpoint found by ``launch``; False when the run starts anew."""
        directory = self.resume_from
        if directory is None:
            return False
        for policy in self.policies:
            await policy.learner.load(directory / policy.name)
        store = Store(directory / "state")
        _, state = store.get("run")
        self.step = int(state["step"])
        for policy in self.policies:
            policy.trained = int(state["trained"][policy.name])
        self.prompts.load_state(state["prompts"])
        get_rng(store)
        if directory.parent.resolve() == self.checkpoints.directory.resolve():
            self._saved = self.step
        self.hooks.on("on_load", run=self, policy=None, store=store)
        self._commit()
        log.info("continuing %s: %d steps are complete", directory, self.step)
        return True

    async def close(self) -> None:
        """Release engines, trainers and files."""
        gc.unfreeze()
        if hasattr(self, "runtime"):
            await self.runtime.close()
        if hasattr(self, "metrics"):
            self.metrics.close()

    def _commit(self) -> None:
        self._committed = {"prompts": self.prompts.state()}

    def _write_examples(self, groups: list[Group]) -> None:
        """A sample of every step's first group, for the report."""
        sample = groups[0][0]
        entry = {
            "step": self.step,
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "reward": sample.reward,
            "status": str(sample.status),
        }
        with (self.directory / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str, ensure_ascii=False) + "\n")


def load_tokenizer(options: Any) -> Any:
    """The checkpoint's tokenizer; CheckpointError when there is none or it has no end token."""
    from transformers import AutoTokenizer

    path = options.hf_checkpoint
    if not path:
        raise ConfigError("no model: give --hf-checkpoint DIR (a Hugging Face checkpoint)")
    if not Path(path).is_dir():
        raise CheckpointError(f"--hf-checkpoint {path}: no such directory; give a local Hugging Face checkpoint")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(f"--hf-checkpoint {path}: its tokenizer cannot be loaded ({first})") from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise CheckpointError(f"--hf-checkpoint {path}: there is no tokenizer in it; copy tokenizer.json there")
    if tokenizer.eos_token_id is None:
        raise CheckpointError(
            f"--hf-checkpoint {path}: its tokenizer has no end-of-sequence token; set eos_token there"
        )
    return tokenizer
