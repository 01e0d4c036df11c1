"""Finds options that name a column or an entry of the metadata that no row has."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miles_core.config.config import Config
from miles_core.data.prompt_source import Row


class MetadataCheck:
    """The entries in the metadata of all prompts, training and evaluation."""

    def __init__(self) -> None:
        self.rows = 0
        self.entries: set[str] = set()

    def counting(self, check: Callable[[Row], None] | None) -> Callable[[Row], None]:
        """Return a check of rows that also records their metadata."""

        def count(row: Row) -> None:
            self.rows += 1
            self.entries.update(row.metadata)
            if check is not None:
                check(row)

        return count

    def find_unused(self, config: Config) -> Iterator[str]:
        """Yield an error message for each of ``--metadata-key`` and ``--generate-key`` that has no effect. Call it if every row was
        counted."""
        column, default = config.data.metadata_key, config.schema.options["data.metadata_key"].default
        where = f"the {self.rows} rows of the prompt files"
        if column != default and not self.entries:
            yield (
                f"{config.origin('data.metadata_key')}: no row has an entry there ({where}), so the option has no effect; give the name of "
                "the column with the mapping, or leave it out"
            )
        key = config.rollout.generate_key
        if key is not None and key not in self.entries:
            has = (
                f"which has {', '.join(sorted(self.entries)[:8])}"
                if self.entries
                else f"which is empty (column {column!r})"
            )
            yield (
                f"{config.origin('rollout.generate_key')}: no row has this entry in its metadata, {has} ({where}), so every prompt uses "
                f"--generate {config.rollout.generate}; correct the name, or leave it out"
            )
