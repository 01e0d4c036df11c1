"""Layouts of trainers and engines, and the interface through which backends propose them.

A backend has one object per side under the entry-point group ``miles.planning``, named ``trainer.NAME``, ``engine.NAME`` or
``runtime.NAME``. Layouts contain option changes, so that a found layout becomes a command line, and the memory rows of the backend's own
estimate (``Plugin.memory``), so that the search and the plan agree about what fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from miles_core.plugin import ConfigError, Facts, Usage

GROUP = "miles.planning"
Changes = Mapping[str, Any]
Estimate = Callable[[], tuple[Usage, ...]]


@dataclass(frozen=True)
class TrainerLayout:
    """How a trainer is split over its GPUs.

    Attributes:
        ranks: GPUs of the trainer.
        tp, pp, cp, ep, etp: tensor, pipeline, context, expert and expert-tensor parallel sizes.
        virtual: chunks per pipeline stage.
        stage_layers: decoder layers of the largest stage.
        last_layers: decoder layers of the last stage; 0 if it has as many.
        tokens: maximum tokens per micro-batch of one replica.
        samples: samples per micro-batch; 0 if it is filled up to ``tokens``.
        recompute: share of a layer's forward pass that the backward pass repeats, 0 to 1.
        offloaded: fraction of the optimizer's state in host memory.
        precision: number format of the products.
        sharded: weights are sharded over all ranks and gathered layer by layer.
        modules: whose layers compute, a suffix of the efficiencies ``train_*``; empty for Megatron-Core's.
        changes: options that select this layout.
        estimate: returns the memory of its processes, as the backend estimates it.
    """

    ranks: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    virtual: int = 1
    stage_layers: int = 1
    last_layers: int = 0
    tokens: int = 8192
    samples: int = 0
    recompute: float = 0.0
    offloaded: float = 0.0
    precision: str = "bf16"
    sharded: bool = False
    modules: str = ""
    changes: Changes = field(default_factory=dict)
    estimate: Estimate = tuple

    @property
    def dp(self) -> int:
        """Replicas of the model."""
        return self.ranks // (self.tp * self.pp * self.cp)


@dataclass(frozen=True)
class EngineLayout:
    """How engines are split over GPUs.

    Attributes:
        count: number of engines.
        tp, pp, ep, dp: tensor, pipeline, expert and attention-data-parallel sizes of one engine.
        slots: sequences that an engine decodes at once.
        cache: tokens that an engine's cache holds.
        weights: bytes of weights on one GPU.
        token_bytes: bytes of cache per token on one GPU.
        state_bytes: bytes of the states of one sequence on one GPU, which every decoding step reads and writes.
        precision: number format of the weights.
        changes, estimate: as for ``TrainerLayout``.
    """

    count: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    slots: int = 256
    cache: int = 1 << 20
    weights: float = 0.0
    token_bytes: float = 0.0
    state_bytes: float = 0.0
    precision: str = "bf16"
    changes: Changes = field(default_factory=dict)
    estimate: Estimate = tuple

    @property
    def gpus(self) -> int:
        """GPUs of one engine."""
        return self.tp * self.pp


class TrainerPlanner(Protocol):
    """What a trainer's backend provides under ``trainer.NAME``."""

    def read(self, facts: Facts, model: Mapping[str, Any]) -> TrainerLayout | None:
        """Return the layout that the options configure; None if they are invalid or the model is not supported."""
        ...

    def find(self, facts: Facts, model: Mapping[str, Any], ranks: int, budget: float) -> Iterator[TrainerLayout]:
        """Yield every legal layout on ``ranks`` GPUs whose processes need at most ``budget`` bytes."""
        ...

    def explain(self, facts: Facts, model: Mapping[str, Any], ranks: int) -> str:
        """Return why ``find`` yields nothing, with numbers."""
        ...


class EnginePlanner(Protocol):
    """What an engine's backend provides under ``engine.NAME``."""

    def read(self, facts: Facts, model: Mapping[str, Any], gpus: int) -> EngineLayout | None:
        """Return the layout that the options configure, with engines on ``gpus`` GPUs in all; None if it is invalid."""
        ...

    def find(self, facts: Facts, model: Mapping[str, Any], gpus: int, budget: float) -> Iterator[EngineLayout]:
        """Yield every legal layout on ``gpus`` GPUs whose processes need at most ``budget`` bytes on each."""
        ...

    def explain(self, facts: Facts, model: Mapping[str, Any], gpus: int) -> str:
        """Return why ``find`` yields nothing, with numbers."""
        ...


class RuntimePlanner(Protocol):
    """What a runtime's plugin provides under ``runtime.NAME``."""

    def place(self, ranks: int, machine: int, rollout_gpus: int, per_engine: int) -> Changes | None:
        """Return the options that place ``ranks`` trainer ranks and the engines; None if the runtime cannot.

        Args:
            ranks: GPUs of the trainer.
            machine: GPUs per machine.
            rollout_gpus: GPUs of all engines; the trainer's with ``--colocate``.
            per_engine: GPUs of one engine.
        """
        ...


@cache
def _provided() -> dict[str, Any]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _planner(kind: str, name: str) -> Any:
    entry = _provided().get(f"{kind}.{name}")
    if entry is None:
        known = ", ".join(sorted(n.partition(".")[2] for n in _provided() if n.startswith(f"{kind}.")))
        raise ConfigError(
            f"--{kind} {name}: no layouts of this {kind} can be searched; --search knows {known or 'none'} "
            f"(entry points of the group {GROUP})"
        )
    return entry.load()


def trainer_planner(name: str) -> TrainerPlanner:
    """Return the planner of a trainer. Raises ConfigError if its backend provides none."""
    return cast(TrainerPlanner, _planner("trainer", name))


def engine_planner(name: str) -> EnginePlanner:
    """Return the planner of an engine. Raises ConfigError if its backend provides none."""
    return cast(EnginePlanner, _planner("engine", name))


def runtime_planner(name: str) -> RuntimePlanner:
    """Return the planner of a runtime. Raises ConfigError if its plugin provides none."""
    return cast(RuntimePlanner, _planner("runtime", name))
