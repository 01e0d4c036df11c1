"""Prompts on their way into a rollout: rendered, numbered, and given back when unused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from miles_core.data.sample import Sample


@dataclass(frozen=True)
class Prompt:
    """One prompt with its token ids; samples made from it share ``group_index``."""

    text: str | list[dict[str, Any]]
    tokens: tuple[int, ...]
    label: Any
    metadata: dict[str, Any]
    group_index: int

    def samples(self, count: int) -> list[Sample]:
        """``count`` pending samples, numbered from ``group_index * count``."""
        return [
            Sample(
                prompt=copy.deepcopy(self.text),
                tokens=list(self.tokens),
                label=self.label,
                metadata=copy.deepcopy(self.metadata),
                group_index=self.group_index,
                index=self.group_index * count + i,
            )
            for i in range(count)
        ]


class Source(Protocol):
    """Rows of a prompt file in order, epoch after epoch; ``miles_core.data.prompts.Prompts`` is one."""

    def next(self, n: int) -> list[Any]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class PromptQueue:
    """Numbers prompts and remembers those that were handed out but not used.

    Args:
        source: rows with ``prompt``, ``label`` and ``metadata``.
        render: prompt -> token ids.
    """

    def __init__(self, source: Source, render: Callable[[Any], list[int]]) -> None:
        self.source, self.render = source, render
        self.waiting: list[Prompt] = []
        self.next_group = 0

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts, returned ones first; each gets a new group number."""
        again, self.waiting = self.waiting[:count], self.waiting[count:]
        made = [Prompt(p.text, p.tokens, p.label, p.metadata, self._number()) for p in again]
        for row in self.source.next(count - len(again)):
            made.append(
                Prompt(row.prompt, tuple(self.render(row.prompt)), row.label, dict(row.metadata), self._number())
            )
        return made

    def put_back(self, prompts: list[Prompt]) -> None:
        """Generate these first next time."""
        self.waiting = prompts + self.waiting

    def state(self) -> dict[str, Any]:
        """Position, numbering and waiting prompts, as JSON."""
        waiting = [
            {"text": p.text, "tokens": list(p.tokens), "label": p.label, "metadata": p.metadata} for p in self.waiting
        ]
        return {"source": self.source.state(), "next_group": self.next_group, "waiting": waiting}

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of ``state``."""
        self.source.load_state(state["source"])
        self.next_group = state["next_group"]
        self.waiting = [
            Prompt(w["text"], tuple(w["tokens"]), w["label"], w["metadata"], group_index=-1) for w in state["waiting"]
        ]

    def _number(self) -> int:
        self.next_group += 1
        return self.next_group - 1
