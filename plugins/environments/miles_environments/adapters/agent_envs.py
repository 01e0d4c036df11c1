"""``verifiers:PACKAGE``: an environment of verifiers' v1 interface with its agents, played over several turns.

The environment's own ``run`` plays the episode, with verifiers' rollouts, limits and stops, and its own rewards judge it. The policy is one
of the agents (``policy=NAME`` if there are several). Other agents, such as a simulated user, need ``model`` and ``client``. Options are fields
of the environment's configuration; ``id`` is an environment that plays the package's task set. Tools and containers are refused.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.clients.client import SESSION_ID_HEADER
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from miles_core.plugin import ConfigError
from miles_environments.adapters.policy_harness import HARNESS
from miles_environments.adapters.task_list import TaskList
from miles_environments.conversation import Conversation, Endpoint
from miles_environments.entry import Entry
from miles_environments.environment import Environment, EnvironmentFault, Task


class AgentEnvironment(Environment):
    """The tasks of a package, each the start of an episode. All episodes share an event loop in a thread."""

    several_turns = True

    def __init__(self, entry: Entry) -> None:
        self._where = f"--environments verifiers:{entry.task}"
        options = dict(entry.options)
        wanted = options.pop("policy", None)
        given = {**options, "taskset": {**options.get("taskset", {}), "id": entry.task}}
        try:
            config = resolve_env_config(given)
        except ValidationError as error:
            found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"{self._where}: its configuration refuses the options ({found})") from error
        self._policy = self._choose(wanted, list(agent_config_fields(config)))
        self._env = load_environment(config.model_copy(update=self._seats(config, options, entry.turns)))
        self._check_tools()
        self._tasks = TaskList(self._env.taskset, self._where)
        self.length = self._tasks.length
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _choose(self, wanted: Any, names: list[str]) -> str:
        if wanted in names or (wanted is None and len(names) == 1):
            return wanted or names[0]
        raise ConfigError(f"{self._where}: policy is {wanted!r}; it must be one of the agents {', '.join(names)}")

    def _seats(self, config: Any, options: Mapping[str, Any], turns: int | None) -> dict[str, Any]:
        """Return the configuration of each agent."""
        fixed = {"model", "client", "harness", "runtime"} & set(options.get(self._policy, {}))
        if fixed:
            raise ConfigError(
                f"{self._where}: {self._policy}.{min(fixed)} has no effect, because the run plays this agent; remove it"
            )
        seats = {}
        for name, spec in agent_config_fields(config).items():
            update: dict[str, Any] = {"harness": vf.HarnessConfig(id=HARNESS), "runtime": SubprocessConfig()}
            if name == self._policy:
                update |= {"model": None, "client": None, "max_turns": spec.max_turns or turns}
            elif spec.model is None or spec.client is None:
                raise ConfigError(
                    f"{self._where}: its agent {name} is not the policy; give {name}.model and {name}.client (type=eval, base_url) of the "
                    "model that plays it"
                )
            else:
                update = {key: value for key, value in update.items() if key not in options.get(name, {})}
            seats[name] = spec.model_copy(update=update)
        return seats

    def _check_tools(self) -> None:
        taskset = self._env.taskset
        task_type = type(taskset).task_type()
        if task_type.toolsets(taskset.config.task) or taskset.toolsets(taskset.config):
            raise ConfigError(f"{self._where}: its tasks have tools, and the answers here are texts")
        if task_type.NEEDS_CONTAINER:
            raise ConfigError(f"{self._where}: its tasks need a container, and episodes here run in this process")

    def task(self, number: int, level: int) -> Task:
        return Task(label=getattr(self._tasks[number].data, "answer", None))

    def open(self, number: int, level: int) -> Conversation:
        task = self._tasks[number]
        with self._starting:
            if self._loop is None:
                self._start()
        return Conversation(lambda conversation: self._run(self._play(task, conversation)))

    def _start(self) -> None:
        self._endpoint = Endpoint(SESSION_ID_HEADER)
        self._context = ModelContext("policy", EvalClientConfig(base_url=self._endpoint.url))
        self._serving, loop = AsyncExitStack(), asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._serving.enter_async_context(self._env.serving()), loop).result()
        self._loop = loop

    def _run(self, coroutine: Any) -> Future[Any]:
        assert self._loop is not None  # started by ``open``
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _play(self, task: Any, conversation: Conversation) -> float:
        keys = []

        def watch(trace: Any) -> None:
            if trace.agent.name == self._policy:
                keys.append(trace.id)
                self._endpoint.conversations[trace.id] = conversation

        try:
            episode = await self._env.run_episode(task, self._context, on_trace=watch)
        finally:
            for key in keys:
                del self._endpoint.conversations[key]
        if not self._env.complete(episode):
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise EnvironmentFault("verifiers reports " + "; ".join(f"{e.type}: {e.message}" for e in errors[:3]))
        return float(sum(trace.reward for trace in episode.traces if trace.agent.name == self._policy))

    def close(self) -> None:
        if self._loop is not None:
            self._run(self._serving.aclose()).result(timeout=30)
            self._endpoint.close()
            self._loop.call_soon_threadsafe(self._loop.stop)
