"""The function of a process that encodes and writes samples, so that the training loop does not wait for it. It reads those that stayed where
they were produced. It imports neither torch nor a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np

from miles_tools.samples.files import MEDIA
from miles_tools.samples.rows import (
    JoinedRows,
    Pieces,
    RecordedTokens,
    Row,
    pack,
    response_of,
    store_media,
)
from miles_workers.remote_sample import StoredGroup, unpack_run
from miles_workers.remote_tokens import RemoteTokens, StoredTokens


class _Values:
    """Recorded values that were sent with the reference to the sample."""

    def __init__(self, log_probs: np.ndarray | None, advantages: np.ndarray | None) -> None:
        self.log_probs, self.advantages = log_probs, advantages


class RowWriter:
    """Call it with (file, step, entries, secrets): it returns the tokens whose texts it needs, or None when the file is complete. Call
    it with the texts of these tokens then, which completes the file. It does not hold samples longer."""

    def __init__(self) -> None:
        self._pieces = Pieces(None)
        self._waiting: tuple[Path, list[Row], Sequence[str]] | None = None

    def __call__(self, message: Any) -> list[int] | None:
        """Handle a message. Raises OSError if the file cannot be written, DataError if samples cannot be read."""
        if isinstance(message, dict):
            self._pieces.update(message)
            assert self._waiting is not None
            job, self._waiting = self._waiting, None
            self._write(*job)
            return None
        path, step, entries, secrets = message
        groups: dict[int, StoredGroup] = {}
        tokens: dict[int, StoredTokens] = {}
        rows: list[Row] = []
        for entry in entries:
            joined = isinstance(entry, JoinedRows)
            rows += entry.split() if joined else _read(step, entry, groups, tokens, path.parents[1] / MEDIA)
        unknown = self._pieces.take_unknown(np.concatenate([response_of(row) for row in rows]))
        if unknown:
            self._waiting = path, rows, secrets
            return unknown
        self._write(path, rows, secrets)
        return None

    def _write(self, path: Path, rows: Sequence[Row], secrets: Sequence[str]) -> None:
        path.write_bytes(pack(rows, self._pieces, secrets))


def _read(
    step: int, entry: Any, groups: dict[int, StoredGroup], tokens: dict[int, StoredTokens], media: Path
) -> list[Row]:
    """Convert the samples that ``writers`` refers to, and store their images in ``media``. groups, tokens: those of the message, by the
    identity of their object reference."""
    run, recorded, data_set = entry
    samples = unpack_run(run, groups)
    store_media(media, samples)
    trained: list[RecordedTokens | None] = [None] * len(samples)
    if isinstance(recorded, tuple):
        stored, first = recorded
        values = tokens.setdefault(id(stored), StoredTokens(stored))
        trained = [RemoteTokens(values, first + number) for number in range(len(samples))]
    elif recorded is not None:
        trained = [_Values(*each) for each in recorded]
    return JoinedRows.of(step, [*zip(samples, trained, repeat(data_set), strict=False)]).split()
