"""The parts of a simulated run that ``parts`` refers to: runtime, prompts and reward."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from miles_core.contracts.run import Run, StateKey
from miles_core.data.prompt_source import PromptSource, Row
from miles_planner.simulation.cluster import SimulatedRuntime
from miles_planner.simulation.options import SimulationConfig
from miles_planner.simulation.setup import NAME

#: The runtime, which ``simulation`` makes.
RUNTIME = StateKey[SimulatedRuntime]()


def make_runtime(run: Run) -> SimulatedRuntime:
    """The provider of the runtime."""
    return run.state[RUNTIME]


class EndlessPrompts(PromptSource):
    """The same row without end: the length of a prompt depends on its group."""

    def __init__(self) -> None:
        self.count = 0

    def next(self, n: int) -> list[Row]:
        self.count += n
        return [Row("prompt")] * n

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])


def make_reward(run: Run) -> Callable[[Any, Any], Awaitable[float]]:
    """The provider of the reward: it takes time, and differs within a group."""
    options: SimulationConfig = run.config.plugin(NAME)
    seconds = options.reward_seconds

    async def reward(args: Any, sample: Any) -> float:
        if seconds:
            await asyncio.sleep(seconds)
        return float(sample.index % 2)

    return reward
