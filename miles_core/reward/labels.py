"""Defines which answers a label accepts, for rewards that compare a response with a label. A text is compared as text, a number accepts any
notation of the same number, and a boolean its name. A list holds alternatives.
"""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from numbers import Real
from typing import Any

from miles_core.errors import DataError
from miles_core.reward.reward import check_label

Answer = str | bool | Decimal
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)


def answers_of(label: Any) -> list[Answer]:
    """Return the answers that a label accepts.

    Raises:
        DataError: there is none, or a value is of a type that no response equals, such as a mapping. The message is a sentence about
            the label, without its row.
    """
    if isinstance(label, str) and label and not label.isspace():
        return [label]
    check_label(label)
    several = isinstance(label, list | tuple | set | frozenset) or getattr(label, "ndim", 0) > 0
    answers = [_answer(item, label) for item in (label if several else [label]) if item is not None]
    return [answer for answer in answers if not isinstance(answer, str) or answer.strip()]


def text_of(answer: Answer) -> str:
    """Return an answer as text, a number in its shortest notation without exponent."""
    if not isinstance(answer, Decimal):
        return str(answer)
    digits = f"{answer:f}"
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def is_match(text: str, answer: Answer) -> bool:
    """Return whether a text is the answer, up to white space."""
    if isinstance(answer, bool):
        return text.strip().lower() == str(answer).lower()
    if isinstance(answer, Decimal):
        return read_number(text) == answer
    words = answer.split()
    return text.split(None, len(words)) == words


def read_number(text: str) -> Decimal | None:
    """Return the exact value of a text in the notations ``-1``, ``.5``, ``2.`` and ``1e3``; None if it is anything else."""
    text = text.strip()
    return Decimal(text) if _NUMBER.fullmatch(text) else None


def _answer(item: Any, label: Any) -> Answer:
    if not isinstance(item, Real) and hasattr(item, "item") and getattr(item, "ndim", 1) == 0:
        item = (
            item.item()
        )  # a scalar of numpy or torch, except for the numbers of numpy, which print their shortest notation
    if isinstance(item, str | bool):
        return item
    if isinstance(item, Decimal | Real) and read_number(str(item)) is not None:
        return Decimal(str(item))
    if isinstance(item, datetime.date | datetime.time):
        return str(item)
    if isinstance(item, bytes):
        try:
            return item.decode()
        except UnicodeDecodeError as error:
            raise DataError(f"the label {label!r:.80} holds bytes that are not UTF-8 text; store it as text") from error
    raise DataError(
        f"the label {label!r:.80} holds {item!r:.40} ({type(item).__name__}), which no response equals; store a text, a number or a list of "
        "acceptable answers"
    )
