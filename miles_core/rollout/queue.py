"""Queue of prompts: renders and numbers prompts, tracks those in use, and accepts unused prompts back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from miles_core.data.prompt_source import PromptSource, Row
from miles_core.data.sample import Sample
from miles_core.errors import DataError

#: The run stops after this many consecutive rows were skipped.
GIVE_UP = 1000


@dataclass(frozen=True)
class Prompt:
    """One prompt with its token ids; samples made from it share ``group_index``."""

    text: str | list[dict[str, Any]]
    tokens: tuple[int, ...]
    label: Any
    metadata: dict[str, Any]
    group_index: int
    policy: str = ""

    def samples(self, count: int) -> list[Sample]:
        """Create ``count`` pending samples, numbered from ``group_index * count``."""
        return [
            Sample(
                prompt=copy.deepcopy(self.text),
                tokens=list(self.tokens),
                label=self.label,
                metadata=copy.deepcopy(self.metadata),
                group_index=self.group_index,
                index=index,
                policy=self.policy,
            )
            for index in self.indexes(count)
        ]

    def indexes(self, count: int) -> range:
        """Return the indexes of the ``count`` samples of this prompt."""
        return range(self.group_index * count, (self.group_index + 1) * count)

    def to_json(self) -> dict[str, Any]:
        """Return all fields except ``group_index``."""
        data = {"text": self.text, "tokens": list(self.tokens), "label": self.label, "metadata": self.metadata}
        return data | ({"policy": self.policy} if self.policy else {})

    @classmethod
    def from_json(cls, data: dict[str, Any], group_index: int = -1) -> Prompt:
        """Inverse of ``to_json``, with the given ``group_index``."""
        tokens, policy = tuple(data["tokens"]), data.get("policy", "")
        return cls(data["text"], tokens, data["label"], data["metadata"], group_index, policy)


class PromptQueue:
    """Numbers prompts and tracks each of them until it is used or put back.

    Args:
        source: supplies rows.
        render: row -> token ids, or None to skip the row.
        kind: name of the source (``--prompts``); ``load_state`` rejects the state of another kind.

    Attributes:
        waiting: prompts that were put back; ``next`` returns them first.
        out: prompts in use by group number: neither used up nor put back yet.
        left_out: number of rows that ``render`` skipped.
    """

    def __init__(self, source: PromptSource, render: Callable[[Row], list[int] | None], kind: str = "file") -> None:
        self.source, self.render, self.kind = source, render, kind
        self.waiting: deque[Prompt] = deque()
        self.out: dict[int, Prompt] = {}
        self.next_group = 0
        self.left_out = 0
        self._left_out_since = 0

    def next(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, starting with those put back. Each gets a new group number."""
        again = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        made = [replace(prompt, group_index=self._number()) for prompt in again]
        while len(made) < count:
            made += self._render_rows(count - len(made))
        self.out |= {p.group_index: p for p in made}
        return made

    def _render_rows(self, count: int) -> list[Prompt]:
        """Render the next ``count`` rows; skipped rows yield no prompt.

        Raises:
            DataError: the source did not return ``count`` rows, or ``GIVE_UP`` consecutive rows were skipped.
        """
        rows = self.source.next(count)
        if not isinstance(rows, list) or len(rows) != count or not all(isinstance(row, Row) for row in rows):
            raise DataError(
                f"the prompt source {type(self.source).__name__} was asked for {count} rows and returned {rows!r:.80}; next(n) must "
                "return a list of n miles_core.data.Row"
            )
        made = []
        for row in rows:
            tokens = self.render(row)
            if tokens is not None:
                prompt = Prompt(row.prompt, tuple(tokens), row.label, dict(row.metadata), self._number(), row.policy)
                made.append(prompt)
                self._left_out_since = 0
                continue
            self.left_out += 1
            self._left_out_since += 1
            if self._left_out_since >= GIVE_UP:
                raise DataError(
                    f"the last {GIVE_UP} prompts of the source are all longer than --rollout-max-prompt-len; raise it, or correct the source"
                )
        return made

    def put_back(self, prompts: list[Prompt]) -> None:
        """Return prompts to the front of the queue."""
        self.mark_used(prompts)
        self.waiting.extendleft(reversed(prompts))

    def mark_used(self, prompts: Iterable[Prompt]) -> None:
        """Stop tracking prompts that were trained on or rejected by a filter."""
        for prompt in prompts:
            self.out.pop(prompt.group_index, None)

    def state(self, held: Collection[int] = ()) -> dict[str, Any]:
        """Return the source's position, the numbering and the prompts to generate again, as JSON. Prompts in use come first,
        without the group numbers in ``held``, whose samples the caller stores."""
        out = [prompt for number, prompt in sorted(self.out.items()) if number not in held]
        waiting = [prompt.to_json() for prompt in (*out, *self.waiting)]
        return {"kind": self.kind, "source": self.source.state(), "next_group": self.next_group, "waiting": waiting}

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of ``state``.

        Raises:
            DataError: the state belongs to another kind of source.
        """
        if (kind := state.get("kind", self.kind)) != self.kind:
            raise DataError(
                f"cannot resume: the prompts came from --prompts {kind} when the checkpoint was saved, and come from {self.kind} now; give "
                "the same source, or start a new run from the saved weights"
            )
        self.source.load_state(state["source"])
        self.next_group = state["next_group"]
        self.waiting = deque(Prompt.from_json(prompt) for prompt in state["waiting"])
        self.out = {}

    def _number(self) -> int:
        self.next_group += 1
        return self.next_group - 1
