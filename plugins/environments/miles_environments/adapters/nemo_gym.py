"""``nemo_gym:URL?rows=FILE``: a resources server of NeMo Gym (github.com/NVIDIA-NeMo/Gym) that is already running, by its HTTP interface.

The rows are those of the server's data set (``data/*.jsonl``): each has the prompt in ``responses_create_params``, and what the server
needs to judge an answer. A server with ``/step`` plays episodes: the messages of the prompt and the observation of ``/reset`` are the
first observation. A server with ``/verify`` judges single answers. Each answer and each episode has a separate session (a cookie). Rows with
tools are refused.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_core.plugin import ConfigError
from miles_environments.entry import Entry
from miles_environments.environment import Environment, EnvironmentFault, Episode, Step, Task
from miles_environments.libraries import check_options

#: Seconds for one request; judges that call a model take long.
TIMEOUT = 300.0


class Session:
    """A session with the server, which keeps its cookie."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Request ``path`` with a JSON body. EnvironmentFault if the server does not answer with a JSON object."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=TIMEOUT) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = error.read(200).decode(errors="replace")
            raise EnvironmentFault(f"{self._url}{path} answered {error.code} {text!r}") from error
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"{self._url}{path} did not answer ({error})") from error
        if not isinstance(found, dict):
            raise EnvironmentFault(f"{self._url}{path} answered {found!r:.80}, not a JSON object")
        return found


class ServedEpisode(Episode):
    """One episode on the server."""

    def __init__(self, url: str, row: Mapping[str, Any]) -> None:
        self._session, self._row = Session(url), row

    def reset(self) -> str:
        first = self._session.call("/reset", self._row).get("observation")
        texts = [message["content"] for message in read_prompt(self._row)]
        return "\n\n".join([*texts, *([first] if first else [])])

    def step(self, action: str) -> Step:
        found = self._session.call("/step", {**self._row, "response": as_response(action)})
        done = bool(found.get("terminated") or found.get("truncated"))
        return Step(found.get("observation") or "", found["reward"], done)


class ResourcesServer(Environment):
    """The rows of a data set, judged by a server."""

    def __init__(self, entry: Entry) -> None:
        where = f"--environments nemo_gym:{entry.task}"
        check_options(entry.options, ("rows",), f"nemo_gym:{entry.task}")
        if not entry.options.get("rows"):
            raise ConfigError(f"{where}: it names no tasks; give the rows of the server's data set, rows=FILE.jsonl")
        self.url, self._rows = entry.task, read_rows(Path(str(entry.options["rows"])), where)
        self.length = len(self._rows)
        try:
            paths = Session(self.url).call("/openapi.json").get("paths", {})
        except EnvironmentFault as error:
            raise ConfigError(f"{where}: {error}; start the server before the run") from error
        self.several_turns = "/step" in paths
        if not self.several_turns and "/verify" not in paths:
            raise ConfigError(f"{where}: it is not a resources server, which answers /verify or /step")

    def task(self, number: int, level: int) -> Task:
        row = self._rows[number]
        return Task() if self.several_turns else Task(read_prompt(row), row.get("answer"))

    def score(self, number: int, level: int, answers: Sequence[str | None]) -> list[float | dict[str, float]]:
        return [self._verify(self._rows[number], answer or "") for answer in answers]

    def _verify(self, row: Mapping[str, Any], answer: str) -> float:
        session = Session(self.url)
        session.call("/seed_session", row)
        found: float = session.call("/verify", {**row, "response": as_response(answer)})["reward"]
        return found

    def open(self, number: int, level: int) -> ServedEpisode:
        return ServedEpisode(self.url, self._rows[number])


def read_rows(path: Path, where: str) -> list[dict[str, Any]]:
    """Read the rows of a data set. ConfigError for a file that cannot be read, and for a row without a prompt or with tools."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: rows={path} cannot be read ({error})") from error
    for number, row in enumerate(rows, 1):
        asked = row.get("responses_create_params") if isinstance(row, dict) else None
        if not isinstance(asked, dict) or not asked.get("input"):
            raise ConfigError(f"{where}: {path}:{number} has no prompt (responses_create_params.input)")
        if asked.get("tools"):
            raise ConfigError(f"{where}: {path}:{number} has tools, and the answers here are texts; remove the row")
    if not rows:
        raise ConfigError(f"{where}: rows={path} has no rows")
    return rows


def read_prompt(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the prompt of a row as chat messages."""
    given = row["responses_create_params"]["input"]
    return [{"role": "user", "content": given}] if isinstance(given, str) else [_plain(message) for message in given]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return {"role": "system" if message["role"] == "developer" else message["role"], "content": text}


def as_response(text: str) -> dict[str, Any]:
    """Return an answer as an object of OpenAI's Responses interface."""
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"id": "message", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    named = {"id": "response", "object": "response", "created_at": 0, "model": "policy", "output": [item]}
    return named | {"parallel_tool_calls": False, "tool_choice": "none", "tools": []}


def make(entry: Entry, seed: int) -> ResourcesServer:
    """Make the environment of an entry; the tasks do not depend on the seed."""
    return ResourcesServer(entry)
