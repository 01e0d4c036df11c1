r"""The rewards ``exact``, ``boxed`` and ``f1``, which compare a response with a label by rules on their texts.

Each rule is ``rule(response, label) -> float`` in [0, 1]. ``labels`` defines which answers a label accepts; the best score counts. The
reasoning of a response is not a part of its answer (``strip_reasoning``). An empty response scores 0; a missing label is an error.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from miles_core.chat.marks import strip_reasoning
from miles_core.data.sample import Sample
from miles_core.reward.labels import answers_of, is_match, text_of
from miles_core.reward.reward import compares_label

#: A brace, or the begin of a box. ``\framebox`` is ``\fbox`` with an optional width and position.
BRACES = re.compile(r"\\(?:boxed|fbox|framebox(?:\s*\[[^][{}]{0,40}\]){0,2})\s*\{|\\[{}]|[{}]")
Rule = Callable[[str | None, Any], float]
Reward = Callable[[Any, Sample], Awaitable[float]]


def exact(response: str | None, label: Any) -> float:
    """Return 1 if the response equals the label, ignoring differences in white space, else 0."""
    answer = strip_reasoning(response or "")
    for accepted in answers_of(label):
        if is_match(answer, accepted):
            return 1.0
    return 0.0


def boxed(response: str | None, label: Any) -> float:
    r"""Return 1 if the content of the last ``\boxed{...}`` equals the label (or the label's box) up to white space, else 0."""
    accepted = answers_of(label)
    answer = last_boxed(strip_reasoning(response or ""))
    if answer is None:
        return 0.0
    return float(any(is_match(answer, unboxed(each) if isinstance(each, str) else each) for each in accepted))


def f1(response: str | None, label: Any) -> float:
    """Return the token F1 of the SQuAD evaluation: bags of lower-case words without punctuation and articles."""
    answer = _squad_tokens(strip_reasoning(response or ""))
    return max(_token_f1(answer, _squad_tokens(text_of(accepted))) for accepted in answers_of(label))


def find_boxes(text: str) -> list[tuple[int, int, int]]:
    r"""Return every complete ``\boxed{...}``, ``\fbox{...}`` or ``\framebox{...}``, with braces nested to any depth: positions of the
    command, and of the start and end of the content, in the order of the starts.

    ``\{`` and ``\}`` are part of the content and do not count as braces. An unclosed box is ignored.
    """
    open_braces: list[tuple[int, int]] = []
    found = []
    for match in BRACES.finditer(text):
        token = match.group()
        if token.endswith("{") and token != r"\{":
            open_braces.append((-1 if token == "{" else match.start(), match.end()))
        elif token == "}" and open_braces:
            command, start = open_braces.pop()
            if command >= 0:
                found.append((command, start, match.start()))
    return sorted(found)


def last_boxed(text: str) -> str | None:
    """Return the content of the last box in ``text``, as it is written; None if there is none."""
    boxes = find_boxes(text)
    return text[boxes[-1][1] : boxes[-1][2]] if boxes else None


def unboxed(text: str) -> str:
    """Return the content of the last box in ``text``, or ``text`` itself if there is none."""
    inner = last_boxed(text)
    return text if inner is None else inner


def _squad_tokens(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _token_f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    common = sum((Counter(answer) & Counter(gold)).values())
    return 2 * common / (len(answer) + len(gold))


def _provider(rule: Rule) -> Callable[[], Reward]:
    """Make the provider of a reward that is ``rule``."""

    async def reward(args: Any, sample: Sample) -> float:
        return rule(sample.response, sample.label)

    reward.rule = rule  # type: ignore[attr-defined]  # see ``RewardFunction``
    return compares_label(lambda: reward, answers_of)


make_exact, make_boxed, make_f1 = _provider(exact), _provider(boxed), _provider(f1)
