"""Rows of training data in the layouts of Hugging Face data sets.

    messages                        a conversation; every assistant message is trained
    prompt, completion              two texts, or two lists of messages
    prompt, chosen, rejected        a preference: texts, or lists of messages
    chosen, rejected                two conversations with the same beginning, which is the prompt

A ``Row`` of this source has the prompt, and as its label a dict of the answers by column. In the layout ``messages`` the prompt is empty and the
answer is the whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.data import ParquetFile, Prompts, Row
from miles_core.plugin import DataError, Run

#: The columns of the answers, by layout.
SUPERVISED, PREFERENCE = (("messages",), ("completion",)), (("chosen", "rejected"),)
COLUMNS = ("prompt", "messages", "completion", "chosen", "rejected")


class OfflineRows(Prompts):
    """The rows of ``--prompt-data`` (or of held-out data), epoch after epoch.

    Args:
        paths: files, as for ``Prompts``.
        paired: whether every row is a preference; otherwise every row is supervised.
        shuffle, seed: as for ``Prompts``.
    """

    def __init__(self, paths: str, paired: bool, shuffle: bool, seed: int) -> None:
        self.layouts = PREFERENCE if paired else SUPERVISED
        super().__init__(paths, shuffle=shuffle, seed=seed, open_parquet=ParquetFile, columns=COLUMNS)

    def check(self, row: dict[str, Any], place: str) -> None:
        """Raise DataError, which names the row and the column, unless the row has one of the layouts."""
        answers = self._answers(row, place)
        prompt = row.get("prompt")
        for name, value in answers.items():
            check_side(value, name, place)
            if prompt is not None and isinstance(value, str) is not isinstance(prompt, str):
                raise DataError(
                    f"{place}: the prompt is {_kind(prompt)} and the column {name!r} is {_kind(value)}; both must be texts, or both "
                    "lists of messages"
                )
        if prompt is not None and "messages" not in answers:
            check_side(prompt, "prompt", place)
        elif prompt is None and (text := next((name for name, value in answers.items() if isinstance(value, str)), None)):
            raise DataError(f"{place}: the column {text!r} is a text, but there is no column 'prompt'; the columns are: {_names(row)}")
        if len(answers) == 2 and answers["chosen"] == answers["rejected"]:
            raise DataError(
                f"{place}: the columns 'chosen' and 'rejected' are equal, so the row expresses no preference; correct or remove it"
            )
        self._check_roles(answers, place)

    def convert(self, row: dict[str, Any], at: int, place: str) -> Row:
        """Return the row with its prompt, and its answers as the label."""
        answers, prompt = self._answers(row, place), row.get("prompt")
        if "messages" in answers or (prompt is None and len(answers) == 1):
            prompt = []
        elif prompt is None:
            prompt = _common(answers["chosen"], answers["rejected"])
            answers = {name: value[len(prompt) :] for name, value in answers.items()}
            if empty := [name for name, value in answers.items() if not value]:
                raise DataError(f"{place}: the column {empty[0]!r} is the beginning of the other one, so it has no answer of its own")
        return Row(prompt=_clean(prompt), label={n: _clean(v) for n, v in answers.items()}, index=at, place=place, examined=self.examined)

    def _answers(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        for layout in self.layouts:
            if all(row.get(name) is not None for name in layout):
                return {name: row[name] for name in layout}
        wanted = " or ".join("prompt, chosen and rejected" if len(names) == 2 else names[-1] for names in self.layouts)
        missing = next((n for names in self.layouts for n in names if len(names) == 2 and row.get(n) is None), "")
        absent = f"no column {missing!r}" if missing else f"none of the columns {wanted.replace(' or ', ', ')}"
        raise DataError(f"{place}: {absent}; a row needs {wanted}, and has: {_names(row)}")

    def _check_roles(self, answers: Mapping[str, Any], place: str) -> None:
        for name, value in answers.items():
            if isinstance(value, list) and not any(message["role"] == "assistant" for message in value):
                raise DataError(f"{place}: no message in the column {name!r} has the role 'assistant', so nothing is trained; remove the row")


def check_side(value: Any, name: str, place: str) -> None:
    """Raise DataError unless a column is a text that is not empty or a list of messages with roles and contents."""
    if isinstance(value, str) and value:
        return
    if not isinstance(value, list) or not value:
        what = "is empty" if value in ("", []) else f"is {value!r:.80}, not a text or a list of messages"
        raise DataError(f"{place}: the column {name!r} {what}; correct or remove the row")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{place}: message {number} in the column {name!r} is {message!r:.80}; a message has a 'role' and a 'content'")
        if message["role"] == "assistant" and not message.get("content") and not message.get("tool_calls"):
            raise DataError(f"{place}: message {number} in the column {name!r} is an assistant message without content; remove the row")


def open_rows(run: Run, paths: str, train: bool = True) -> OfflineRows:
    """Open training or held-out rows in the layout that the run's estimator trains on."""
    config = run.config
    paired = config.algorithm.advantage_estimator in ("dpo", "ipo")
    return OfflineRows(paths, paired, train and config.data.shuffle, config.train.seed)


def _common(first: list[Any], second: list[Any]) -> list[Any]:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return first[:same]


def _clean(value: Any) -> Any:
    """Remove null entries of messages: parquet adds all keys to every message, and a chat template must not see absent ones."""
    if isinstance(value, str):
        return value
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]


def _kind(value: Any) -> str:
    return "a text" if isinstance(value, str) else "a list of messages"


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, (name for name, value in row.items() if value is not None))) or "none"
