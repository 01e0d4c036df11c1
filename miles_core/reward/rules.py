r"""Rule-based rewards, which compare a response with a label without a model.

Each rule is ``rule(response, label) -> float`` in [0, 1]. A label may be a string, a number, or a list of acceptable answers (the
best score counts). An empty response scores 0; a missing label is an error.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from miles_core.errors import DataError

BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
Rule = Callable[[str | None, Any], float]


def labels_of(label: Any) -> list[str]:
    """Return the acceptable answers as strings.

    Raises:
        DataError: there is no answer, or all are empty.
    """
    labels = list(label) if isinstance(label, (list, tuple)) else [label]
    texts = [str(item) for item in labels if item is not None]
    if not any(text.strip() for text in texts):
        raise DataError(f"the label is {label!r}, so there is nothing to compare with; check --label-key and the data")
    return texts


def exact(response: str | None, label: Any) -> float:
    """Return 1 if the response equals the label, ignoring differences in white space, else 0."""
    answer = _normalize_space(response or "")
    return float(any(answer == _normalize_space(text) for text in labels_of(label)))


def boxed(response: str | None, label: Any) -> float:
    r"""Return 1 if the content of the last ``\boxed{...}`` equals the label (or the label's box) up to white space, else 0."""
    accepted = labels_of(label)
    answer = last_boxed(response or "")
    if answer is None:
        return 0.0
    answer = _normalize_space(answer)
    return float(any(answer == _normalize_space(unboxed(text)) for text in accepted))


def f1(response: str | None, label: Any) -> float:
    """Return the token F1 of the SQuAD evaluation: bags of lower-case words without punctuation and articles."""
    answer = _squad_tokens(response or "")
    return max(_token_f1(answer, _squad_tokens(text)) for text in labels_of(label))


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last complete ``\boxed{...}``, with braces nested to any depth; None if there is none.

    ``\{`` and ``\}`` are part of the content and do not count as braces. An unclosed box is ignored.
    """
    open_braces: list[tuple[bool, int]] = []
    last: tuple[int, int] | None = None
    for match in BRACES.finditer(text):
        token = match.group()
        if token.endswith("{") and token != r"\{":
            open_braces.append((token != "{", match.end()))
        elif token == "}" and open_braces:
            is_box, start = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[last[0] : last[1]]


def unboxed(text: str) -> str:
    """Return the content of the last box in ``text``, or ``text`` itself if there is none."""
    inner = last_boxed(text)
    return text if inner is None else inner


def _normalize_space(text: str) -> str:
    return " ".join(text.split())


def _squad_tokens(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _token_f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    common = sum((Counter(answer) & Counter(gold)).values())
    return 2 * common / (len(answer) + len(gold))


RULES: dict[str, Rule] = {"exact": exact, "boxed": boxed, "f1": f1}
"""The rules that need nothing but the two texts."""
