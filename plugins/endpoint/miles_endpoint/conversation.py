"""Finds the turn that a request continues, by its messages.

The messages of all requests of a sample form a tree, one for each set of tools: every node corresponds to a path of messages, and holds the
turns whose answer is the last message of the path. A request continues the deepest turn on its path if the messages after it
can be appended to the turn's tokens. Otherwise the whole conversation is rendered, as a new branch, for one of ``REASONS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_core.plugin import Turn
from miles_endpoint.messages import ChatMessage

#: Why a request that shows earlier answers does not continue one -> meaning.
REASONS = {
    "edited": "the request holds an assistant's message that no engine wrote, or that was changed",
    "tools": "the same messages, with other tools",
    "length": "the answer reached its length limit, so no message can follow it",
    "prefill": "the request ends with an assistant's message",
    "reasoning": "the chat template removes the reasoning of earlier answers when these messages follow",
    "rewrites": "the chat template changes earlier text when these messages follow",
    "stop_token": "the answer ended with another token than the chat template's",
    "refused": "the chat template cannot append these messages",
}


class Place:
    """A place of the tree.

    Attributes:
        children: digest of the next message -> the place after it.
        turns: (turn, its reasoning), in the order of the answers.
    """

    __slots__ = ("children", "turns")

    def __init__(self) -> None:
        self.children: dict[bytes, Place] = {}
        self.turns: list[tuple[Turn, str]] = []


@dataclass(frozen=True)
class Match:
    """The result of a search.

    Attributes:
        turn: the turn that the request continues; None for a new branch or conversation.
        new: number of the request's last messages that follow the turn.
        reason: key of ``REASONS`` if the request shows earlier answers and does not continue one; "" otherwise.
        found: whether the request holds an answer of this sample.
    """

    turn: Turn | None
    new: int
    reason: str = ""
    found: bool = False


@dataclass
class Conversations:
    """All conversations of a sample."""

    roots: dict[bytes, Place] = field(default_factory=dict)

    def find(self, tools: bytes, messages: Sequence[ChatMessage]) -> Match:
        """Find the turn that ``messages`` continue, under the tools with the digest ``tools``."""
        count = len(messages)
        turn, end = _deepest(self.roots.get(tools), messages)
        shown = any(message.role == "assistant" for message in messages)
        if turn is not None and end == count:
            return Match(None, count, "prefill", True)
        if turn is not None and not any(message.role == "assistant" for message in messages[end:]):
            if turn.response.finish != "stop":
                return Match(None, count, "length", True)
            return Match(turn, count - end, "", True)
        if not shown or not self.roots:
            return Match(None, count)
        others = (root for digest, root in self.roots.items() if digest != tools)
        elsewhere = max((_deepest(root, messages)[1] for root in others), default=0)
        return Match(None, count, "tools" if elsewhere > end else "edited", turn is not None or elsewhere > 0)

    def add(
        self, tools: bytes, messages: Sequence[ChatMessage], answers: Sequence[bytes], turn: Turn, reasoning: str
    ) -> None:
        """Record that ``turn`` answered ``messages``. ``answers``: every digest by which a request may show the answer."""
        place = self.roots.setdefault(tools, Place())
        for message in messages:
            place = place.children.setdefault(message.digest, Place())
        for digest in dict.fromkeys(answers):
            place.children.setdefault(digest, Place()).turns.append((turn, reasoning))


def _deepest(root: Place | None, messages: Sequence[ChatMessage]) -> tuple[Turn | None, int]:
    """Return the deepest turn on the path, and the number of messages up to its answer."""
    place, turn, end = root, None, 0
    for number, message in enumerate(messages, 1):
        place = place.children.get(message.digest) if place is not None else None
        if place is None:
            break
        wanted = message.reasoning
        fitting = [t for t, reasoning in place.turns if wanted is None or wanted.strip() == reasoning.strip()]
        if fitting:
            turn, end = fitting[-1], number
        elif place.turns:  # an answer with other reasoning: its continuation was not generated
            return turn, end
    return turn, end
