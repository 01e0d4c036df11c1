"""Parses the entries of ``--environments``: environment, weight and options.

As text: ``LIBRARY:TASK?key=value&key=value``. In a configuration file also as a table: ``{name: LIBRARY, task: TASK, key: value}``. Keys that this
module does not know are options of the library; a table ``options`` holds those whose names are known here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from miles_core.plugin import ConfigError

#: Library -> whether an episode has several turns; None if the environment decides.
LIBRARIES: dict[str, bool | None] = {
    "reasoning_gym": False,
    "verifiers": None,
    "gymnasium": True,
    "textarena": True,
    "openenv": True,
    "nemo_gym": None,
    "harbor": True,
    "file": None,
}


@dataclass(frozen=True)
class Entry:
    """One environment of a mixture.

    Attributes:
        library: a key of ``LIBRARIES``.
        task: name of the task: a data set, an environment's id, an address, or ``FILE.py:Class``.
        label: name in metrics.
        weight: relative frequency.
        first, count: the tasks from number ``first``, repeated after ``count``; None for all of them.
        level: difficulty level at the start.
        curriculum: whether the level follows the success.
        up, down: rates of success above and below which the level changes.
        window: number of rollouts whose rate of success decides.
        success: reward from which a rollout is a success.
        turns: answers per episode; None is ``--environment-turns``.
        answer: where the answer is in the response: ``tag`` (``<answer>``), ``text`` (all of it), ``line`` (the last line) or ``number`` (the
            last number).
        instructions: system message; None is the library's.
        options: options of the library.
    """

    library: str
    task: str
    label: str
    weight: float = 1.0
    first: int = 0
    count: int | None = None
    level: int = 0
    curriculum: bool = False
    up: float = 0.8
    down: float = 0.2
    window: int = 64
    success: float = 0.99
    turns: int | None = None
    answer: str = ""
    instructions: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


_KEYS: dict[str, tuple[type, ...]] = {
    "label": (str,),
    "weight": (int, float),
    "first": (int,),
    "count": (int,),
    "level": (int,),
    "curriculum": (bool,),
    "up": (int, float),
    "down": (int, float),
    "window": (int,),
    "success": (int, float),
    "turns": (int,),
    "answer": (str,),
    "instructions": (str,),
}
_ANSWERS = ("tag", "text", "line", "number")


def read_entries(raw: tuple[Any, ...], flag: str) -> list[Entry]:
    """Read the entries of an option; labels are made unique.

    Raises:
        ConfigError: an entry is malformed.
    """
    entries: list[Entry] = []
    for one in raw:
        entry = read_entry(one, flag)
        if entry.label in {other.label for other in entries}:
            raise ConfigError(
                f"{flag}: two entries have the label {entry.label!r}; give one of them another: label=NAME"
            )
        entries.append(entry)
    return entries


def read_entry(raw: Any, flag: str) -> Entry:
    """Read one entry: a text or a table.

    Raises:
        ConfigError: the entry is malformed; names it.
    """
    where = f"{flag} {raw!r:.120}"
    if isinstance(raw, str):
        given = _parse(raw, where)
    elif isinstance(raw, Mapping) and all(isinstance(key, str) for key in raw):
        given = {str(key): value for key, value in raw.items()}
    else:
        raise ConfigError(f"{where}: an environment is LIBRARY:TASK, or a table with name and task")
    library, task = given.pop("name", ""), given.pop("task", "")
    if library not in LIBRARIES:
        raise ConfigError(f"{where}: there is no library {library!r:.40}; the libraries are {', '.join(LIBRARIES)}")
    if not isinstance(task, str) or not task:
        raise ConfigError(f"{where}: it names no task; write {library}:TASK")
    options = given.pop("options", {})
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: options is {options!r:.80}; it is a table")
    known = {key: _check(key, given.pop(key), where) for key in list(given) if key in _KEYS}
    label = known.pop("label", "") or task.rpartition("/")[2].rpartition(":")[2] or library
    entry = Entry(library, task, label, options={**given, **options}, **known)
    _check_ranges(entry, where)
    return entry


def _parse(text: str, where: str) -> dict[str, Any]:
    head, _, query = text.partition("?")
    library, separator, task = head.partition(":")
    given: dict[str, Any] = {"name": library, "task": task if separator else ""}
    for pair in filter(None, query.split("&")):
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise ConfigError(f"{where}: {pair!r} is not key=value")
        if key in given:
            raise ConfigError(f"{where}: {key} is given twice")
        given[key] = _value(key, unquote(value))
    return given


def _value(key: str, text: str) -> Any:
    if str in _KEYS.get(key, ()):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check(key: str, value: Any, where: str) -> Any:
    kinds = _KEYS[key]
    if bool in kinds and value in (0, 1):
        return bool(value)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = {str: "a text", bool: "true or false", int: "a number"}[kinds[0]]
        raise ConfigError(f"{where}: {key} is {value!r:.40}; it must be {wanted}")
    return value


def _check_ranges(entry: Entry, where: str) -> None:
    problems = {
        "weight must be above 0": entry.weight <= 0,
        "first must be at least 0": entry.first < 0,
        "count must be at least 1": entry.count is not None and entry.count < 1,
        "level must be at least 0": entry.level < 0,
        "turns must be at least 1": entry.turns is not None and entry.turns < 1,
        "window must be at least 1": entry.window < 1,
        "down must be below up, both from 0 to 1": not 0 <= entry.down < entry.up <= 1,
        f"answer must be one of {', '.join(_ANSWERS)}": bool(entry.answer) and entry.answer not in _ANSWERS,
    }
    for problem, holds in problems.items():
        if holds:
            raise ConfigError(f"{where}: {problem}")
