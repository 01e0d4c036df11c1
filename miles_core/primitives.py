"""The primitives of a policy: the steps of the training loop as separate calls, without data files, rewards, schedule and loop.

    async with open_run(config, plan, manifests, directory) as run:
        policy = await run.add(Policy("model/"))
        samples = await policy.sample(prompt, 8)
        ...                                            # rewards, advantages: the caller's
        await policy.forward_backward(samples, "ppo")  # gradients add up over calls
        await policy.optimizer_step(lr=1e-5)
        await policy.sync()                            # from here on, ``sample`` uses the new weights

``miles_core.api.open_run`` takes the options of ``miles train`` instead. All calls of one ``OpenRun`` belong to one event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from miles_core.checkpoint.rng import seed_generators
from miles_core.config.config import Config
from miles_core.contracts.engine import Sampling
from miles_core.contracts.run import Policy, Run
from miles_core.contracts.runtime import Gradients, Metrics, PolicyParts, Runtime
from miles_core.data.column import TOKENS, Column, find_token_fault
from miles_core.data.sample import Sample
from miles_core.errors import CheckpointError, ConfigError, DataError
from miles_core.observe.hints import hints_of
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan
from miles_core.rollout.requests import EngineRequests
from miles_core.rollout.sampling import training_sampling
from miles_core.rollout.transcript import add_response
from miles_core.run.directory import claim_directory
from miles_core.run.make import make_run
from miles_core.run.parts import notify_plugins, runtime_of
from miles_core.run.prepare import apply_plan, localise, prepare, set_environment
from miles_core.sync.push import check_synced, push
from miles_core.train.named_losses import LOSS_SUM, NamedLoss, check_loss, evaluate, vocabulary_of

#: File of a saved state that describes it.
STATE = "state.json"


class OpenPolicy:
    """One policy of an ``OpenRun``. Its state consists of weights, optimizer, and the gradients since the last ``optimizer_step``.

    Attributes:
        policy, parts: the policy, its trainer and its engine.
    """

    def __init__(self, run: Run, parts: PolicyParts) -> None:
        self.run, self.parts, self.policy = run, parts, parts.policy
        self._numbers, self._groups = count(), count()
        engines = {} if parts.engine is None else {self.policy.name: parts.engine}
        self._requests = EngineRequests(run, engines, training_sampling(run.config_of(self.policy)), {})

    async def sample(
        self, prompt: Sequence[int], n: int = 1, sampling: Sampling | None = None, first: int | None = None
    ) -> list[Sample]:
        """Generate ``n`` responses to a prompt with the weights of the last ``sync``.

        Args:
            prompt: token ids.
            n: number of responses; they form a group.
            sampling: sampling parameters; by default those of the run's options.
            first: number of the first sample. Random numbers depend only on ``--seed`` and the sample's number, so responses to the same
                prompt with the same numbers and weights are equal. By default samples are numbered from 0 in the order of the calls.

        Raises:
            DataError: the prompt is empty, has tokens outside the vocabulary, or leaves no room for a response.
        """
        tokens = self._check_tokens(prompt, "prompt")
        numbers = [next(self._numbers) for _ in range(n)] if first is None else [*range(first, first + n)]
        chosen = sampling or training_sampling(self.run.config_of(self.policy))
        group, name = next(self._groups), self.policy.name
        self.parts.serving  # noqa: B018  (raises if there is no engine)
        made = [Sample(tokens=tokens, group_index=group, index=number, policy=name) for number in numbers]
        asked = [self._requests.start(number, group, tokens, chosen, name) for number in numbers]
        try:
            responses = await asyncio.gather(*asked)
        finally:
            self._requests.keys.forget(numbers)
        return [add_response(one, response, self.run.fields) for one, response in zip(made, responses, strict=True)]

    async def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[np.ndarray]:
        """Return the engine's log-probability of each token after the first, [len - 1] float32 per sequence; see ``Engine.score``."""
        checked = [self._check_tokens(sequence, "sequence") for sequence in sequences]
        return await self.parts.serving.score(checked, temperature)

    async def log_probs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return the trainer's log-probabilities of the response tokens, see ``LearnerHandle.log_probs``."""
        return await self.parts.learner.log_probs(samples)

    async def forward_backward(
        self, samples: Sequence[Sample], loss: str, settings: Mapping[str, float] | None = None
    ) -> Gradients:
        """Add the gradients of a loss, see ``LearnerHandle.forward_backward``."""
        return await self.parts.learner.forward_backward(samples, loss, settings)

    async def forward(
        self, samples: Sequence[Sample], loss: str, settings: Mapping[str, float] | None = None
    ) -> Gradients:
        """Compute what ``forward_backward`` returns without gradients. The loss ``policy`` is not supported."""
        check_loss(samples, loss, settings or {}, vocabulary_of(self.run))
        log_probs = await self.log_probs(samples)
        return Gradients({LOSS_SUM: evaluate(samples, log_probs, NamedLoss(loss, settings or {}))}, log_probs)

    async def optimizer_step(self, lr: float | None = None) -> Metrics:
        """Run the optimizer on the gradients, see ``LearnerHandle.optimizer_step``."""
        return await self.parts.learner.optimizer_step(lr)

    async def configure(self, options: Mapping[str, float]) -> None:
        """Change options such as ``train.weight_decay``, see ``LearnerHandle.configure``."""
        await self.parts.learner.configure(options)

    async def sync(self) -> Metrics:
        """Send the current weights to the engine, which is paused meanwhile; returns metrics of the plan's checks."""
        engine = self.parts.serving
        await engine.pause(self.run.config.rollout.pause_generation_mode)
        report = await push(self.parts, self.policy.version + 1)
        await engine.resume()  # not after a failure, because the engine's weights are incomplete then
        self.policy.version = report.version
        return {"sync/bytes": float(report.nbytes), **await check_synced(self.run, self.parts)}

    async def save_state(self, directory: Path | str, overwrite: bool = False) -> None:
        """Write weights and optimizer to a directory, which appears, or replaces an existing one, when it is complete. Held gradients are
        not part of it.

        Raises:
            CheckpointError: the directory exists and ``overwrite`` is False.
        """
        final = Path(directory)
        if final.exists() and not overwrite:
            raise CheckpointError(f"{final} exists; choose another directory, or overwrite it")
        final.parent.mkdir(parents=True, exist_ok=True)
        work, replaced = (final.absolute().parent / f".{final.name}.{word}" for word in ("saving", "replaced"))
        for left_over in (work, replaced):  # of an interrupted call
            shutil.rmtree(left_over, ignore_errors=True)
        work.mkdir()
        await self.parts.learner.save(work)
        (work / STATE).write_text(json.dumps(self._description | {"trained": self.policy.trained}))
        if final.exists():
            os.replace(final, replaced)  # deleting it in place could leave a part of it under its name
        os.replace(work, final)
        shutil.rmtree(replaced, ignore_errors=True)

    async def load_state(self, directory: Path | str, optimizer: bool = True) -> None:
        """Read a saved state, possibly that of another policy. Drops held gradients. ``optimizer=False`` resets the optimizer afterwards.

        Raises:
            CheckpointError: there is no such state, or the model or an option that shapes it differs; nothing has changed.
        """
        saved = read_state(Path(directory))
        for name, value in self._description.items():
            if saved.get(name) != value:
                raise CheckpointError(
                    f"{directory} was saved with {name} = {saved.get(name)}, and the policy {self.policy.name} has {value}"
                )
        await self.parts.learner.load(Path(directory))
        self.policy.trained = int(saved["trained"])
        if not optimizer and self.policy.learns:
            await self.parts.learner.reset_optimizer()

    async def export(self, directory: Path | str) -> None:
        """Write a Hugging Face checkpoint."""
        await self.parts.learner.export(Path(directory))

    def _check_tokens(self, tokens: Sequence[int], name: str) -> Column:
        if not len(tokens):
            raise DataError(f"the {name} has no tokens")
        column = Column(TOKENS, tokens)
        if fault := find_token_fault(column, vocabulary_of(self.run)):
            raise DataError(f"the {name} has {fault}")
        return column

    @cached_property
    def _description(self) -> dict[str, Any]:
        """What a state must have in common with this policy, as JSON data."""
        config = self.run.config_of(self.policy)
        fixed = {fact.name: fact.value for fact in config.facts() if fact.fixed}
        described = {"hf_checkpoint": self.policy.hf_checkpoint or config.model.hf_checkpoint, **fixed}
        return dict(json.loads(json.dumps(described)))


def read_state(directory: Path) -> dict[str, Any]:
    """Return the description of a saved state.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return dict(json.loads((directory / STATE).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory} holds no saved state of a policy") from error


class OpenRun:
    """A run whose policies exist as long as their caller wants.

    Attributes:
        run: the run, as plugins see it.
        policies: name -> open policy.
    """

    def __init__(self, run: Run, runtime: Runtime) -> None:
        self.run, self.runtime = run, runtime
        self.policies: dict[str, OpenPolicy] = {}

    async def add(self, policy: Policy) -> OpenPolicy:
        """Build trainer and engine of a policy, and send the engine its first weights.

        Raises:
            ConfigError: a policy of this name is open, or an option is invalid. After any error the policy is not open.
        """
        if policy.name in self.policies:
            raise ConfigError(f"the policy {policy.name} is open already")
        self.run.config_of(policy)  # raises for invalid options
        self.run.policies[:] = [*(p for p in self.run.policies if p.name != policy.name), policy]
        try:
            opened = OpenPolicy(self.run, await self.runtime.build(policy))
        except BaseException:
            self.run.policies.remove(policy)
            raise
        self.policies[policy.name] = opened
        if policy.generates:
            try:
                await opened.sync()
            except BaseException:
                await self.remove(policy.name)
                raise
        return opened

    async def remove(self, name: str) -> None:
        """Release a policy's trainer and engine. A later policy may have its name."""
        opened = self.policies.pop(name)
        await self.runtime.discard(opened.parts)
        self.run.policies.remove(opened.policy)


@asynccontextmanager
async def open_run(
    config: Config, plan: Plan, manifests: Mapping[str, Plugin], directory: Path
) -> AsyncIterator[OpenRun]:
    """Start a run without policies: hooks see ``on_start`` now and ``on_stop`` after the body, which closes all policies."""
    run = make_run(config, plan, manifests, directory)
    seed_generators(config.train.seed)
    with notify_plugins(run, hints_of(manifests.values(), plan.holds)):
        runtime = runtime_of(run)
        try:
            yield OpenRun(run, runtime)
        finally:
            await runtime.close()


@asynccontextmanager
async def open_requested(requested: Config) -> AsyncIterator[OpenRun]:
    """Resolve a user's configuration, claim its run directory and open the run.

    Raises:
        PlanError, ConfigError: the run cannot work.
    """
    config = localise(requested)
    accepted, catalogue = prepare(config)
    config = apply_plan(config, accepted)
    set_environment(accepted)
    with claim_directory(config) as directory:
        async with open_run(config, accepted, catalogue, directory) as opened:
            yield opened
