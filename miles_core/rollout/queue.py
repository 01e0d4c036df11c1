"""Prompts on their way into a rollout: rendered, numbered, remembered while they are out, given back when unused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
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
                index=index,
            )
            for index in self.indexes(count)
        ]

    def indexes(self, count: int) -> range:
        """The running numbers of its ``count`` samples, which are the keys of their requests."""
        return range(self.group_index * count, (self.group_index + 1) * count)

    def to_json(self) -> dict[str, Any]:
        """Everything but its number."""
        return {"text": self.text, "tokens": list(self.tokens), "label": self.label, "metadata": self.metadata}

    @classmethod
    def from_json(cls, data: dict[str, Any], group_index: int = -1) -> Prompt:
        """Inverse of ``to_json``, under this number."""
        return cls(data["text"], tuple(data["tokens"]), data["label"], data["metadata"], group_index)


class Source(Protocol):
    """Rows of a prompt file in order, epoch after epoch; ``miles_core.data.prompts.Prompts`` is one."""

    def next(self, n: int) -> list[Any]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class PromptQueue:
    """Numbers prompts, and remembers each until it is used or given back.

    Args:
        source: rows with ``prompt``, ``label`` and ``metadata``.
        render: prompt -> token ids.

    Attributes:
        waiting: given back; handed out again first.
        out: handed out, by number: neither used nor given back yet.
    """

    def __init__(self, source: Source, render: Callable[[Any], list[int]]) -> None:
        self.source, self.render = source, render
        self.waiting: list[Prompt] = []
        self.out: dict[int, Prompt] = {}
        self.next_group = 0

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts, returned ones first; each gets a new group number."""
        again, self.waiting = self.waiting[:count], self.waiting[count:]
        made = [Prompt(p.text, p.tokens, p.label, p.metadata, self._number()) for p in again]
        for row in self.source.next(count - len(again)):
            made.append(
                Prompt(row.prompt, tuple(self.render(row.prompt)), row.label, dict(row.metadata), self._number())
            )
        self.out |= {p.group_index: p for p in made}
        return made

    def put_back(self, prompts: list[Prompt]) -> None:
        """Generate these first next time."""
        self.used(prompts)
        self.waiting = prompts + self.waiting

    def used(self, prompts: Iterable[Prompt]) -> None:
        """These are done with: trained on, or refused by a filter."""
        for prompt in prompts:
            self.out.pop(prompt.group_index, None)

    def state(self, held: Collection[int] = ()) -> dict[str, Any]:
        """Position, numbering and the prompts to hand out again, as JSON: those that are out come first, except the
        numbers in ``held``, whose samples are kept elsewhere."""
        out = [prompt for number, prompt in sorted(self.out.items()) if number not in held]
        waiting = [prompt.to_json() for prompt in (*out, *self.waiting)]
        return {"source": self.source.state(), "next_group": self.next_group, "waiting": waiting}

    def load_state(self, state: dict[str, Any]) -> None:
        """Inverse of ``state``."""
        self.source.load_state(state["source"])
        self.next_group = state["next_group"]
        self.waiting = [Prompt.from_json(prompt) for prompt in state["waiting"]]
        self.out = {}

    def _number(self) -> int:
        self.next_group += 1
        return self.next_group - 1
