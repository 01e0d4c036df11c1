"""``verifiers:module:Class``: a task set of verifiers' v1 interface (github.com/PrimeIntellect-ai/verifiers), scored without its harness.

The prompts are those of the tasks. An answer becomes a trace of two messages, which the task's own ``score`` judges: its rewards, weighted, and its
metrics; those that need a runtime (a container) are refused. Options are fields of the task set's configuration.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

from miles_core.plugin import ConfigError
from miles_environments.adapters.task_list import TaskList
from miles_environments.entry import Entry
from miles_environments.environment import Environment, Task


class Taskset(Environment):
    """The tasks of a task set, each with a single answer."""

    def __init__(self, entry: Entry) -> None:
        import verifiers.v1 as vf

        where = f"--environments verifiers:{entry.task}"
        module, _, name = entry.task.rpartition(":")
        found = getattr(importlib.import_module(module), name, None)
        if not (isinstance(found, type) and issubclass(found, vf.Taskset)):
            raise ConfigError(f"{where}: it is not a verifiers.v1.Taskset; write verifiers:module:Class")
        self._tasks = TaskList(found(_config_type(found)(**entry.options)), where)
        self.length = self._tasks.length
        self._check_runtime(self._tasks[0], where)

    def _check_runtime(self, task: Any, where: str) -> None:
        import inspect

        for function in task.hooks("reward"):
            parameter = inspect.signature(function).parameters.get("runtime")
            if parameter is not None and parameter.default is parameter.empty:
                raise ConfigError(
                    f"{where}: its reward {function.__name__} needs a runtime of verifiers (a container); here rewards see the answer only"
                )

    def task(self, number: int, level: int) -> Task:
        data = self._tasks[number].data
        prompt = data.prompt_text if isinstance(data.prompt, str) or data.prompt is None else None
        messages = [{"role": "user", "content": prompt}] if prompt else [_plain(m) for m in data.prompt or ()]
        if data.system_prompt:
            messages.insert(0, {"role": "system", "content": data.system_prompt})
        if not messages:
            raise ValueError(f"task {number} has no prompt")
        return Task(messages, getattr(data, "answer", None))

    def score(self, number: int, level: int, answers: Sequence[str | None]) -> list[float | dict[str, float]]:
        task = self._tasks[number]

        async def score_all() -> list[float | dict[str, float]]:
            return list(await asyncio.gather(*(_score(task, answer or "") for answer in answers)))

        return asyncio.run(score_all())


async def _score(task: Any, answer: str) -> float:
    from verifiers.v1.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, UserMessage

    nodes = [
        MessageNode(message=UserMessage(content=task.data.prompt_text)),
        MessageNode(message=AssistantMessage(content=answer), parent=0, sampled=True),
    ]
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data), agent=AgentInfo(config=AgentConfig()), nodes=nodes
    )
    await task.score(trace)
    rewards = [reward for reward in trace.rewards.values() if reward is not None]
    return float(sum(reward.value for reward in rewards))


def _plain(message: Any) -> dict[str, Any]:
    from verifiers.v1.types import content_text

    return {"role": message.role, "content": content_text(message.content)}


def _config_type(taskset: Any) -> Any:
    from verifiers.v1.configs.taskset import TasksetConfig
    from verifiers.v1.taskset import Taskset as Base
    from verifiers.v1.utils.generic import concrete_type

    return concrete_type(taskset, TasksetConfig, origin=Base) or TasksetConfig


def make(entry: Entry, seed: int) -> Environment:
    """Make the environment of an entry, with agents if it names no class; the tasks do not depend on the seed."""
    if ":" in entry.task:
        return Taskset(entry)
    from miles_environments.adapters.agent_envs import AgentEnvironment

    return AgentEnvironment(entry)
