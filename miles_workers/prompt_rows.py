"""Prompts that rollout workers read from the prompt files.

The driver takes numbers of rows from the files and sends them; a worker reads and renders the rows. In the driver a ``RowPrompt`` is read
when its text, tokens, label or metadata are used: for a checkpoint of groups in use, for a worker that cannot read the files. Prompts of
other sources are rendered in the driver and sent once per group.

Rows of files that are too large to be checked before the run (``prompt_index``) are rendered in the driver as well, because rows that are
invalid or too long must be left out before they get a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.contracts.run import Run
from miles_core.data.prompt_source import PromptSource, Row
from miles_core.data.prompts import Prompts
from miles_core.data.sample import Sample
from miles_core.errors import MilesError, first_line
from miles_core.rollout.queue import FILE, NO_LIMITS, Prompt, PromptQueue, RenderRows, encode_prompt, open_prompts

#: Attributes of a ``RowPrompt`` that are read from the file.
_READ = ("text", "tokens", "label", "metadata")


class PendingGroup(Sequence[Sample]):
    """The pending samples of one prompt, which are made when one of them is used.

    Attributes:
        row: number of the prompt's row in the prompt files; None if it has none.
        indexes: indexes of the samples.
    """

    def __init__(self, prompt: Prompt, count: int) -> None:
        self.row = prompt.row if isinstance(prompt, RowPrompt) else None
        self.indexes = prompt.indexes(count)
        self._prompt = prompt
        self._samples: Sequence[Sample] | None = None

    def __len__(self) -> int:
        return len(self.indexes)

    def __getitem__(self, position: Any) -> Any:
        if self._samples is None:
            self._samples = Prompt.samples(self._prompt, len(self.indexes))
        return self._samples[position]


class SharedPrompt(Prompt):
    """A prompt that is sent once for all samples of a group."""

    def samples(self, count: int) -> PendingGroup:
        return PendingGroup(self, count)


@dataclass(frozen=True, eq=False, repr=False)
class RowPrompt(SharedPrompt):
    """A row of the prompt files, which is read on the first use of its text, tokens, label or metadata.

    Attributes:
        row: number of the row in the files.
        read: reads and renders a row.
    """

    text: Any = field(init=False)
    tokens: Any = field(init=False)
    label: Any = field(init=False)
    metadata: Any = field(init=False)
    row: int = field(kw_only=True)
    read: Callable[[int], Prompt] = field(kw_only=True)

    def __getattr__(self, name: str) -> Any:
        if name not in _READ:
            raise AttributeError(name)
        prompt = self.read(self.row)
        for each in _READ:
            object.__setattr__(self, each, getattr(prompt, each))
        return getattr(self, name)


class RowQueue(PromptQueue):
    """A ``PromptQueue`` for rollout workers. The source is read as without workers, so the order, the numbers and the checkpoints are the
    same.

    Attributes:
        digest: digest of the rows of prompt files; "" if prompts have another source.
    """

    def __init__(self, source: PromptSource, render: RenderRows, *names: str) -> None:
        self._files = source if isinstance(source, Prompts) else None
        self._kept: list[int] = []
        self._encode = render
        super().__init__(source, self._render, *names)
        self.digest = "" if self._files is None else str(self._files.state()["digest"])

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.waiting.extend(share_prompts([self.waiting.popleft() for _ in range(len(self.waiting))]))

    def _render(self, rows: Sequence[Row]) -> list[Sequence[int] | None]:
        encoded = self._encode(rows)
        self._kept += [row.index for row, tokens in zip(rows, encoded, strict=True) if tokens is not None]
        return encoded

    def _render_rows(self, count: int) -> list[Prompt]:
        files, self._kept = self._files, []
        if files is None:
            return share_prompts(super()._render_rows(count))
        if files.examined:  # no row is left out
            return [self._prompt(row, self._number()) for row in files.take(count)]
        rendered = super()._render_rows(count)
        return [self._prompt(row, prompt.group_index) for row, prompt in zip(self._kept, rendered, strict=True)]

    def _prompt(self, row: int, group_index: int) -> RowPrompt:
        return RowPrompt(group_index=group_index, row=row, read=self._read)

    def _read(self, row: int) -> Prompt:
        assert self._files is not None
        found = self._files.row(row)
        [tokens] = self._encode([found])
        assert tokens is not None  # rows that are left out get no number
        return Prompt.of(found, tokens, 0)


def share_prompts(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts as ``SharedPrompt``."""
    return [SharedPrompt(p.text, p.tokens, p.label, p.metadata, p.group_index, p.policy) for p in prompts]


class RowReader:
    """Reads rows of ``--prompt-data`` in a rollout worker.

    Attributes:
        digest: digest of the rows; "" if they cannot be read, or prompts have another source.
        problem: why they cannot be read; "" if they can.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.digest, self.problem = run, "", ""
        config = run.config
        if config.data.prompts != FILE or not config.data.prompt_data:
            return
        try:
            self._files = open_prompts(config, config.data.prompt_data, "--prompt-data")
            self.digest = str(self._files.state()["digest"])
        except (MilesError, OSError) as error:  # files that this machine lacks
            self.problem = first_line(error)

    def read(self, row: int, indexes: Sequence[int]) -> Sequence[Sample]:
        """Return the pending samples of a row, with these consecutive indexes. Raises DataError if the file was changed."""
        found = self._files.row(row)
        tokens = encode_prompt(self.run.render, found, NO_LIMITS)
        return Prompt.of(found, tokens, indexes[0] // len(indexes)).samples(len(indexes))
