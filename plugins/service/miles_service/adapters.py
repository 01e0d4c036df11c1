"""The models of the service: adapters that clients train, and samplers that generate with their saved weights.

An adapter is a policy that trains without an engine. A sampler is a frozen policy with an engine, which loads saved adapters; all of them share
the base's weights. Training does not change saved weights, so a client's sampler keeps generating with them until the client overwrites
them. There are few samplers: one that is idle loads what is needed next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_core.plugin import ConfigError, MilesError, Policy
from miles_core.primitives import STATE, OpenPolicy, OpenRun, read_state

#: Options of Adam by the client's name, and the option of the policy.
ADAM = {
    "beta1": "train.adam_beta1",
    "beta2": "train.adam_beta2",
    "eps": "train.adam_eps",
    "weight_decay": "train.weight_decay",
    "grad_clip_norm": "train.clip_grad",
}
#: Modules of attention and of feed-forward layers, for clients that train only one kind.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
#: Start of the options that shape an adapter.
LORA = "lora."


@dataclass
class Adapter:
    """One client's model.

    Attributes:
        opened: its policy.
        adam: the coefficients that the optimizer has now.
    """

    opened: OpenPolicy
    adam: dict[str, float] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Rank of the adapter."""
        return int(self.opened.run.config_of(self.opened.policy).plugin("lora").rank)

    async def optimizer_step(self, params: Mapping[str, float]) -> dict[str, float]:
        """Run one step of AdamW; returns its metrics."""
        wanted = {name: float(params[name]) for name in ADAM if name in params}
        if wanted != self.adam:
            await self.opened.configure({ADAM[name]: value for name, value in wanted.items()})
            self.adam = wanted
        metrics = await self.opened.optimizer_step(float(params["learning_rate"]))
        return {name.removeprefix("train/"): value for name, value in metrics.items()}


@dataclass(eq=False)
class Sampler:
    """A frozen policy with an engine.

    Attributes:
        opened: the policy.
        shape: options of the adapter that it can load; None for the base alone.
        weights: directory of the weights that it has loaded; None for the base.
        saved: identity of the saved state in this directory when it was loaded; see ``_identify``.
        users: number of requests that use it now.
    """

    opened: OpenPolicy
    shape: dict[str, Any] | None
    weights: Path | None = None
    saved: tuple[int, int] | None = None
    users: int = 0


class Adapters:
    """Creates and releases models.

    Args:
        run: the run.
        most: number of adapters that exist at the same time.
        samplers: number of samplers.
    """

    def __init__(self, run: OpenRun, most: int, samplers: int) -> None:
        self.run, self.most, self.count = run, most, samplers
        self.samplers: list[Sampler] = []
        self._gate, self._idle = asyncio.Lock(), asyncio.Condition()

    def shape_of(self, rank: int, attention: bool, feed_forward: bool, seed: int | None) -> dict[str, Any]:
        """Return the options of an adapter that a client describes. All layers are those of ``--lora-target-modules``."""
        options: dict[str, Any] = {f"{LORA}rank": rank}
        if not attention and not feed_forward:
            raise ConfigError("train_unembed alone is not supported: the output layer gets no adapter here")
        if not attention or not feed_forward:
            options[f"{LORA}target_modules"] = list(ATTENTION if attention else FEED_FORWARD)
        if seed is not None:
            options[f"{LORA}seed"] = seed
        return options

    async def create(self, options: Mapping[str, Any]) -> Adapter:
        """Make a new adapter.

        Raises:
            MilesError: there are as many as allowed.
            ConfigError: an option is invalid.
        """
        names = [f"adapter-{number}" for number in range(self.most)]
        free = next((name for name in names if name not in self.run.policies), None)
        if free is None:
            raise MilesError(
                f"this server trains {self.most} adapters at the same time, and all are in use; unload one, or start it with a larger "
                "--max-adapters"
            )
        return Adapter(await self.run.add(Policy(name=free, generates=False, options=dict(options))))

    async def restore(self, directory: Path, optimizer: bool) -> Adapter:
        """Make an adapter of the shape and with the state of a saved one."""
        saved = read_state(directory)
        made = await self.create({name: value for name, value in saved.items() if name.startswith(LORA)})
        try:
            await made.opened.load_state(directory, optimizer)
        except BaseException:
            await self.remove(made)
            raise
        return made

    async def remove(self, adapter: Adapter) -> None:
        """Release an adapter."""
        await self.run.remove(adapter.opened.policy.name)

    @asynccontextmanager
    async def sampler(self, weights: Path | None) -> AsyncIterator[OpenPolicy]:
        """Provide a sampler that has these weights, None for the base. Requests that need others wait in the order of their arrival."""
        async with self._gate:
            found = self._find(weights) or await self._load(weights)
            self.samplers.remove(found)
            self.samplers.append(found)  # the least recently used one is first
            found.users += 1
        try:
            yield found.opened
        finally:
            found.users -= 1
            async with self._idle:
                self._idle.notify_all()

    def _find(self, weights: Path | None) -> Sampler | None:
        saved = None if weights is None else _identify(weights)
        for each in self.samplers:
            same = each.weights == weights and saved in (each.saved, None)  # deleted weights stay loaded
            if same and (each.shape is None) == (weights is None):
                return each
        return None

    async def _load(self, weights: Path | None) -> Sampler:
        """Load weights into a new sampler, or into an idle one if there are as many as allowed."""
        shape = None
        if weights is not None:
            shape = {name: value for name, value in read_state(weights).items() if name.startswith(LORA)}
        found: Sampler | None = None
        if len(self.samplers) >= self.count:
            async with self._idle:
                await self._idle.wait_for(lambda: any(not each.users for each in self.samplers))
            idle = [each for each in self.samplers if not each.users]
            found = next((each for each in idle if shape is not None and each.shape == shape), None)
            if found is None:
                self.samplers.remove(idle[0])
                await self.run.remove(idle[0].opened.policy.name)
        found = found or await self._build(shape)
        if weights is not None:
            found.weights = None  # until the load is complete
            saved = _identify(weights)
            await found.opened.load_state(weights)
            await found.opened.sync()
            found.weights, found.saved = weights, saved
        return found

    async def _build(self, shape: dict[str, Any] | None) -> Sampler:
        name = next(n for n in (f"sampler-{i}" for i in range(self.count)) if n not in self.run.policies)
        options, follows = dict(shape or {}), "" if shape is None else "adapter-0"
        policy = Policy(name=name, role="frozen", generates=True, options=options, follows=follows)
        made = Sampler(await self.run.add(policy), shape)
        self.samplers.append(made)
        return made


def _identify(directory: Path) -> tuple[int, int] | None:
    """Return a value that differs after the state in a directory was overwritten; None if there is no state."""
    try:
        found = (directory / STATE).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
