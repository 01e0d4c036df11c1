r"""Finds the final answer of a mathematical response and converts it to a form that math-verify reads correctly.

The answer is what the last box holds, ``\boxed{...}``, ``\fbox{...}`` or ``\framebox{...}``, unless "final answer is ..." follows it.
Boxes separated only by commas, "and" or "or" are one answer with several parts. Without a box, math-verify searches the text for one. It
misreads notations that models write: 1e3 as 3 times e, ``1\,000`` as 0, and "12." not at all. Here they become plain decimal numbers.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, Context, Decimal

from miles_core.chat.marks import strip_reasoning
from miles_core.reward.labels import read_number, text_of
from miles_core.reward.text_rules import find_boxes

#: A box without braces: ``\boxed 42``.
_BARE = re.compile(r"\\(?:boxed|fbox)\s+(?=[-+.\w])([-+]?[\w.,/]*\w)")
#: Text between the boxes of one answer.
_BETWEEN = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],; ]|\\q?quad|\\text\s*\{\s*(?:and|or)\s*\}|\band\b|\bor\b|\b[A-Za-z]\w{0,3}\s*=)*"
)
_SEPARATOR = re.compile(r"[,;]|\band\b|\bor\b")
#: A statement of the answer that follows a box and replaces it, as in Minerva's format.
_STATEMENT = re.compile(r"final answer\b.{0,100}?(?:\bis\b|:)[^\w$\\]{0,20}[-\d$\\]", re.IGNORECASE | re.DOTALL)
_PERCENT = re.compile(r"[\s$]*(?:\\?%|percent|pct\b)", re.IGNORECASE)
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d{1,3}(?!\w)", re.ASCII)
_GROUPS = re.compile(r"(?<=\d)(?:\{,\}|,?\\!|\\[,;: ]|~)(?=\d{3}(?!\d))", re.ASCII)
_SPACED = re.compile(r"[-+]?[1-9]\d{0,2}(?:[ ,]\d{3})+(?:\.\d+)?", re.ASCII)
_LAST_POINT = re.compile(r"(?<=\d)\.(?![\d.])", re.ASCII)
_STYLED = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox)\s*\{\s*([-+]?\d[\d.,]*)\s*\}", re.ASCII
)
_WORD = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{\s*(\w+)\s*\}")
#: Decimal places, and for numbers below 1 significant digits, in which an answer agrees with a label that is a decimal number.
PLACES = 6


def read_answer(text: str) -> tuple[str, bool]:
    """Return the answer in a response or label, and whether it was in a box."""
    text = _BARE.sub(r"\\boxed{\1}", strip_reasoning(text))
    boxes = find_boxes(text)
    if not boxes or _STATEMENT.search(text, boxes[-1][2]):
        return tidy(text[boxes[-1][2] + 1 :] if boxes else text, whole=False), False
    group = [boxes[-1]]  # from the last box to the first
    for box in reversed(boxes[:-1]):
        between = text[box[2] + 1 : group[-1][0]]
        if (
            box[2] >= group[-1][0]
            or not _BETWEEN.fullmatch(between)
            or (between.strip() and not _SEPARATOR.search(between))
        ):
            break
        group.append(box)
    answer = ", ".join(dict.fromkeys(tidy(text[start:end]) for _, start, end in reversed(group)))
    return answer + (r"\%" if _PERCENT.match(text[group[0][2] + 1 :]) else ""), True


def tidy(text: str, whole: bool = True) -> str:
    """Remove exponents, thousands separators and styles from numbers. ``whole``: the text is only an answer, not prose that contains
    one."""
    text = _GROUPS.sub("", _STYLED.sub(r"\1", text.strip()))
    text = _SCIENTIFIC.sub(lambda found: text_of(Decimal(found[0])), text)
    if not whole:
        return text
    text = _LAST_POINT.sub("", text.strip("$").rstrip(" .,;"))
    text = worded[1] if (worded := _WORD.fullmatch(text)) else text
    return re.sub("[ ,]", "", text) if _SPACED.fullmatch(text) else text


def compare_numbers(answer: str, label: str) -> bool | None:
    """Return whether two plain numbers are equal; None if one of the texts is something else.

    An integer label accepts only its exact value. A label with decimal places may be rounded, so the answer is compared in ``PLACES``.
    """
    given, wanted = read_number(answer), read_number(label)
    if given is None or wanted is None:
        return None
    if given == wanted or "." not in text_of(wanted):
        return given == wanted
    places = PLACES - min(0, wanted.adjusted() + 1)
    context = Context(prec=400, rounding=ROUND_HALF_EVEN)
    if abs(given.adjusted()) > context.prec // 2 or places > context.prec // 2:
        return False
    step = Decimal(1).scaleb(-places)
    return given.quantize(step, context=context) == wanted.quantize(step, context=context)
