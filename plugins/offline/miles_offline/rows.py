"""Rows of training data in the layouts of Hugging Face data sets.

    messages                        a conversation; every assistant message is trained
    prompt, completion              two texts, or a list of messages and its answer, a list of messages or a text
    prompt, chosen, rejected        a preference, with two answers of these kinds
    chosen, rejected                two conversations with the same beginning, which is the prompt
    prompt, completion, label       an answer that is desirable (label true) or not (false)

``--input-key`` names the column of messages or of the prompt if it has another name, and ``--label-key`` that of the completion.
The schemas of functions in the column ``tools``, a list or the text of a JSON list, are given to the chat template. For reward models a
preference may have a number in the column ``margin``.

A ``Row`` of this source has the prompt, and as its label a dict of the answers by column. In the layout ``messages`` the prompt is empty and the
answer is the whole conversation. The metadata hold the schemas, the label and the margin.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from miles_core.data import ParquetFile, Prompts, Row
from miles_core.plugin import DataError, Run

#: Default of ``--input-key``, which no layout has.
_INPUT = "input"
TOOLS, LABEL, MARGIN_COLUMN = "tools", "label", "margin"
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


class OfflineRows(Prompts):
    """The rows of ``--prompt-data`` (or of held-out data), epoch after epoch.

    Args:
        paths: files, as for ``Prompts``.
        paired: whether every row is a preference of two answers.
        labelled: whether every row is an answer with a label; if neither, every row is supervised.
        margins: whether a preference may have a column ``margin``, the smallest difference of its scores.
        input_key, label_key: ``--input-key`` and ``--label-key``.
        shuffle, seed: as for ``Prompts``.
    """

    def __init__(
        self,
        paths: str,
        paired: bool,
        input_key: str,
        label_key: str | None,
        shuffle: bool,
        seed: int,
        labelled: bool = False,
        margins: bool = False,
    ) -> None:
        self.labelled, self.margins = labelled, margins
        own = input_key != _INPUT
        self.prompt = input_key if label_key or own else "prompt"
        self.layouts: tuple[tuple[str, ...], ...] = ((input_key,),) if own else (("messages",), ("completion",))
        if label_key:
            self.layouts = ((label_key,),)
        elif paired:
            self.layouts = (("chosen", "rejected"),)
        elif labelled:
            self.layouts = (("completion", LABEL),)
        columns = (self.prompt, *(name for layout in self.layouts for name in layout), TOOLS, MARGIN_COLUMN)
        super().__init__(paths, shuffle=shuffle, seed=seed, open_parquet=ParquetFile, columns=columns)

    def check(self, row: dict[str, Any], place: str) -> None:
        """Raise DataError, which names the row and the column, unless the row has one of the layouts."""
        if media := next((name for name in _MEDIA if row.get(name)), None):
            raise DataError(
                f"{place}: the column {media!r} is not empty, and the plugin trains on text only; remove it"
            )
        read_tools(row, place)
        answers = self._answers(row, place)
        if self.labelled and not isinstance(row[LABEL], bool):
            raise DataError(
                f"{place}: the column {LABEL!r} is {row[LABEL]!r:.80}; it must be true (the completion is desirable) or false"
            )
        if self.margins:
            read_margin(row, place)
        prompt = self._prompt(row, answers)
        for name, value in answers.items():
            check_side(value, name, place)
            if isinstance(prompt, str) and not isinstance(value, str):
                raise DataError(
                    f"{place}: the column {self.prompt!r} is a text and the column {name!r} is a list of messages; an answer to a text is a "
                    "text"
                )
        if prompt is not None:
            check_side(prompt, self.prompt, place)
        elif text := next((name for name, value in answers.items() if isinstance(value, str)), None):
            raise DataError(
                f"{place}: the column {text!r} is a text, but there is no column {self.prompt!r} with its prompt; the columns are: "
                f"{_names(row)}"
            )
        if len(answers) == 2 and answers["chosen"] == answers["rejected"]:
            raise DataError(
                f"{place}: the columns 'chosen' and 'rejected' are equal, so the row expresses no preference; correct or remove it"
            )
        self._check_roles(answers, place)

    def convert(self, row: dict[str, Any], at: int, place: str) -> Row:
        """Return the row with its prompt, and its answers as the label."""
        answers = self._answers(row, place)
        prompt = self._prompt(row, answers)
        if prompt is None and len(answers) == 1:
            prompt = []
        elif prompt is None:
            prompt = _common(answers["chosen"], answers["rejected"])
            answers = {name: value[len(prompt) :] for name, value in answers.items()}
            if empty := [name for name, value in answers.items() if not value]:
                raise DataError(
                    f"{place}: the column {empty[0]!r} is the beginning of the other one, so it has no answer of its own"
                )
        return Row(
            prompt=_clean(prompt),
            label={n: _clean(v) for n, v in answers.items()},
            metadata=({TOOLS: tools} if (tools := read_tools(row, place)) else {})
            | ({LABEL: row[LABEL]} if self.labelled else {})
            | ({MARGIN_COLUMN: read_margin(row, place)} if self.margins else {}),
            index=at,
            place=place,
            examined=self.examined,
        )

    def _prompt(self, row: Mapping[str, Any], answers: Mapping[str, Any]) -> Any:
        """Return the prompt; None if the answers are whole conversations."""
        return None if "messages" in answers or self.prompt in answers else row.get(self.prompt)

    def _answers(self, row: Mapping[str, Any], place: str) -> dict[str, Any]:
        for layout in self.layouts:
            if all(row.get(name) is not None for name in (*layout, *((self.prompt,) if self.labelled else ()))):
                return {name: row[name] for name in layout if not (self.labelled and name == LABEL)}
        wanted = " or ".join(_layout(names, self.prompt) for names in self.layouts)
        raise DataError(f"{place}: a row needs {wanted}, and its columns are: {_names(row)}")

    def _check_roles(self, answers: Mapping[str, Any], place: str) -> None:
        for name, value in answers.items():
            if isinstance(value, list) and not any(message["role"] == "assistant" for message in value):
                raise DataError(
                    f"{place}: no message in the column {name!r} has the role 'assistant', so nothing is trained; remove the row"
                )


def check_side(value: Any, name: str, place: str) -> None:
    """Raise DataError unless a column is a text that is not empty or a list of messages with roles and contents."""
    if isinstance(value, str) and value:
        return
    if not isinstance(value, list) or not value:
        what = "is empty" if value in ("", []) else f"is {value!r:.80}, not a text or a list of messages"
        raise DataError(f"{place}: the column {name!r} {what}; correct or remove the row")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{place}: message {number} in the column {name!r} is {message!r:.80}; a message has a 'role' and a 'content'"
            )
        if message["role"] == "assistant" and not message.get("content") and not message.get("tool_calls"):
            raise DataError(
                f"{place}: message {number} in the column {name!r} is an assistant message without content; remove the row"
            )


def read_tools(row: Mapping[str, Any], place: str) -> list[Any]:
    """Return the schemas of functions in the column ``tools``; empty without it. DataError if it is neither a list nor the text of one."""
    tools = row.get(TOOLS)
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools)
    if tools is None or isinstance(tools, list):
        return tools or []
    raise DataError(
        f"{place}: the column {TOOLS!r} is {tools!r:.80}; it must be a list of schemas, or the text of a JSON list"
    )


def read_margin(row: Mapping[str, Any], place: str) -> float:
    """Return the number in the column ``margin``; 0 without it. DataError if it is not a finite number."""
    margin = row.get(MARGIN_COLUMN)
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise DataError(
            f"{place}: the column {MARGIN_COLUMN!r} is {margin!r:.80}; it must be a finite number, the difference that the scores of "
            "'chosen' and 'rejected' should have"
        )
    return float(margin)


def open_rows(run: Run, paths: str, train: bool = True) -> OfflineRows:
    """Open training or held-out rows in the layout that the run's estimator trains on."""
    data = run.config.data
    estimator, shuffle = run.config.algorithm.advantage_estimator, train and data.shuffle
    keys, seed = (data.input_key, data.label_key), run.config.train.seed
    scored = estimator == "reward_model"
    paired = scored or estimator in ("dpo", "ipo")
    return OfflineRows(paths, paired, *keys, shuffle, seed, labelled=estimator == "kto", margins=scored)


def _layout(names: Sequence[str], prompt: str) -> str:
    if names in (("messages",), (prompt,)):
        return f"the column {names[0]!r}"
    *first, last = (prompt, *names)
    return f"the columns {', '.join(map(repr, first))} and {last!r}"


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


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, (name for name, value in row.items() if value is not None))) or "none"
