"""Contract tests for prompt sources; subclass the contract and implement ``make``."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod

from miles_core.data.prompt_source import PromptSource, Row


class PromptSourceContract(ABC):
    """Contract tests for a prompt source."""

    @abstractmethod
    def make(self) -> PromptSource:
        """Make a new source that is not started."""

    def make_started(self) -> PromptSource:
        """Make a new source and start it."""
        source = self.make()
        asyncio.run(source.start())
        return source

    def test_it_returns_as_many_rows_as_it_is_asked_for(self) -> None:
        source = self.make_started()
        for count in (1, 3, 0, 2):
            rows = source.next(count)
            assert isinstance(rows, list) and len(rows) == count
            for row in rows:
                assert isinstance(row, Row) and row.prompt, f"{row!r} is not a miles_core.data.Row with a prompt"
                json.dumps(row.metadata)  # checkpoints store it

    def test_it_continues_where_its_state_was_taken(self) -> None:
        source = self.make_started()
        source.next(3)
        state = json.loads(json.dumps(source.state()))
        following = source.next(5)
        source.load_state(state)
        assert source.next(5) == following, "load_state does not restore the state of a source"
        another = self.make_started()
        another.load_state(state)
        assert another.next(5) == following, "a new source does not continue from the state of an old one"

    def test_how_rows_are_divided_over_calls_does_not_matter(self) -> None:
        one, two = self.make_started(), self.make_started()
        assert one.next(2) + one.next(3) == two.next(5)

    def test_a_finite_source_begins_again_at_its_end(self) -> None:
        source = self.make_started()
        assert source.length is None or source.length > 0
        if source.length is not None and source.length <= 10_000:
            rows = source.next(source.length + 1)
            assert len(rows) == source.length + 1

    def test_it_can_be_stopped_and_started_again(self) -> None:
        source = self.make_started()
        asyncio.run(source.stop())
        asyncio.run(source.start())
        assert len(source.next(1)) == 1
        asyncio.run(source.stop())
