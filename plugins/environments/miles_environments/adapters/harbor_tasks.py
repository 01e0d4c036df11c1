"""``harbor:FOLDER``: the tasks of Harbor (github.com/harbor-framework/harbor) in a folder, each a trial of its agent Terminus 2.

A trial is a process, ``harbor trial start``: it starts the task's container, its agent requests the answers of the policy, and the task's tests
judge the end. ``harbor=PATH`` is the command (Harbor needs Python 3.12, so it may have its own environment), ``config=FILE`` a trial
configuration of Harbor, for example with another type of container. ``reward=NAME`` selects one of several rewards of the tests.
"""

from __future__ import annotations

import shutil
import threading
import uuid
from concurrent.futures import Future
from pathlib import Path

from miles_core.plugin import ConfigError
from miles_environments.adapters.harbor_trial import Trial
from miles_environments.conversation import Conversation, Endpoint
from miles_environments.entry import Entry
from miles_environments.environment import Environment, Task
from miles_environments.libraries import check_options

#: An episode is one conversation, so the agent does not summarise it; a recording would install a program in each container.
_AGENT = {"enable_summarize": False, "record_terminal_session": False}
#: The size of the model for LiteLLM; the run itself limits the length of the conversation.
_MODEL = {"max_input_tokens": 10**7, "max_output_tokens": 10**7, "input_cost_per_token": 0, "output_cost_per_token": 0}


class HarborTasks(Environment):
    """The task folders in a folder, sorted by name; or the folder itself, if it is a task."""

    several_turns = True

    def __init__(self, entry: Entry) -> None:
        where = f"--environments harbor:{entry.task}"
        check_options(entry.options, ("harbor", "config", "reward"), f"harbor:{entry.task}")
        folder = Path(entry.task).expanduser().resolve()
        self._folders = sorted(path.parent for pattern in ("task.toml", "*/task.toml") for path in folder.glob(pattern))
        if not self._folders:
            raise ConfigError(f"{where}: there is no task (task.toml) in {folder} or in a folder of it")
        self.length = len(self._folders)
        program = str(entry.options.get("harbor", "harbor"))
        if shutil.which(program) is None:
            raise ConfigError(
                f"{where}: there is no command {program}; install harbor (Python 3.12), or give harbor=PATH"
            )
        self._command = [program, "trial", "start"]
        if config := entry.options.get("config"):
            if not Path(str(config)).is_file():
                raise ConfigError(f"{where}: config={config} is not a file")
            self._command += ["-c", str(config)]
        self._reward, self._turns = str(entry.options.get("reward", "reward")), entry.turns
        self._endpoint: Endpoint | None = None
        self._trials: list[Trial] = []
        self._starting = threading.Lock()

    def task(self, number: int, level: int) -> Task:
        return Task(label=self._folders[number].name)

    def open(self, number: int, level: int) -> Conversation:
        with self._starting:
            self._endpoint = self._endpoint or Endpoint("Authorization")
        endpoint = self._endpoint
        return Conversation(lambda conversation: self._begin(endpoint, self._folders[number], conversation))

    def _begin(self, endpoint: Endpoint, folder: Path, conversation: Conversation) -> Future[float]:
        key = uuid.uuid4().hex
        options = {"api_base": endpoint.url, "llm_kwargs": {"api_key": key}, "model_info": _MODEL, **_AGENT}
        agent = {"name": "terminus-2", "model_name": "openai/policy", "kwargs": {**options, "max_turns": self._turns}}
        endpoint.conversations[f"Bearer {key}"] = conversation
        trial = Trial(self._command, {"task": {"path": str(folder)}, "agent": agent}, self._reward)
        with self._starting:
            self._trials = [one for one in self._trials if one.running] + [trial]
        trial.result.add_done_callback(lambda _: endpoint.conversations.pop(f"Bearer {key}"))
        return trial.result

    def close(self) -> None:
        for trial in self._trials:
            trial.result.cancel()
        for trial in self._trials:
            trial.close()
        if self._endpoint is not None:
            self._endpoint.close()


def make(entry: Entry, seed: int) -> HarborTasks:
    """Make the environment of an entry; the tasks do not depend on the seed."""
    return HarborTasks(entry)
