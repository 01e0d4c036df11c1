"""What a step reads and writes of all running rows: one entry per slot of the cache.

A step that samples one token per row appends to arrays here, with a few operations for all rows. A row reads its tokens from these arrays
when something asks for them (``Row.tokens``): a decoder that feeds them, or the response.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles_embedded.engine.row import Row

#: Steps until rows read their tokens, so that the arrays do not grow with the responses.
_STEPS = 256
#: Weight version of a row without a token.
_NO_VERSION = np.iinfo(np.int64).min


class RowColumns:
    """Columns of the running rows; ``count`` entries are in use.

    Args:
        vocabulary: number of token ids.

    Attributes:
        lengths: [slots] int64 tokens of each row, prompt included.
        limits: [slots] int64 lengths at which rows end.
        last: [slots] int64 last token of each row, which is not cached yet.
        keys: [slots] int64 request keys.
        variants: [slots] int64 variant of the model of each row.
        temperatures: [slots] float64, 0 for greedy rows.
    """

    lengths: np.ndarray
    limits: np.ndarray
    last: np.ndarray
    keys: np.ndarray
    variants: np.ndarray
    _versions: np.ndarray
    _read: np.ndarray

    def __init__(self, vocabulary: int) -> None:
        self.count = 0
        self._stops = np.zeros(vocabulary, bool)
        self._steps = 0
        self._allocate(np.zeros((7, 0), np.int64), np.zeros(0), np.zeros(0, bool), np.zeros((_STEPS, 2, 0)))

    def join(self, rows: Sequence[Row]) -> None:
        """Add rows, which have the next slots."""
        first, self.count = self.count, self.count + len(rows)
        if self.count > len(self.lengths):
            self._grow(max(self.count, 2 * len(self.lengths)))
        new = slice(first, self.count)
        self._read[new] = self._steps
        self.keys[new] = [row.request.key for row in rows]
        self.limits[new] = [row.limit for row in rows]
        self.variants[new] = [row.variant for row in rows]
        self.temperatures[new] = [row.request.sampling.temperature for row in rows]
        self._texts[new] = [row.text is not None for row in rows]
        for ids in {row.stops for row in rows}:
            self._stops[[token for token in ids if 0 <= token < len(self._stops)]] = True
        for row in rows:
            row.columns = self
        self.refresh(rows)

    def leave(self, rows: Sequence[Row]) -> None:
        """Let rows read their tokens before their slots are freed; ``move`` follows."""
        for row in rows:
            self.read(row)
            row.columns = None

    def move(self, where: np.ndarray, sources: np.ndarray, count: int) -> None:
        """Move rows from slots ``sources`` to ``where``; ``count`` rows remain."""
        if len(where):
            for columns in (self._integers, self._log[: self._steps]):
                columns[..., where] = columns[..., sources]
            for column in (self.temperatures, self._texts):
                column[where] = column[sources]
        self.count = count
        if not count:
            self._steps = 0
            self._stops[:] = False

    def clear(self, rows: Sequence[Row]) -> None:
        """Drop all rows."""
        self.leave(rows)
        nothing = np.zeros(0, np.int64)
        self.move(nothing, nothing, 0)

    def refresh(self, rows: Sequence[Row]) -> None:
        """Take over lengths, last tokens and versions of rows that were appended to one by one."""
        slots = [row.slot for row in rows]
        self._versions[slots] = [_NO_VERSION if row.version is None else row.version for row in rows]
        self.lengths[slots] = [len(row.tokens) for row in rows]
        self.last[slots] = [row.tokens[-1] for row in rows]

    def read(self, row: Row) -> None:
        """Append the tokens of a row that it has not read yet to the row."""
        start = self._read[row.slot]
        if start < self._steps:
            self._read[row.slot] = self._steps
            found = self._log[start : self._steps, :, row.slot]
            row.append_bytes(found[:, 0].astype(np.int32).tobytes(), found[:, 1].tobytes())

    def append(self, tokens: np.ndarray, log_probs: np.ndarray, versions: np.ndarray, rows: Sequence[Row]) -> list[int]:
        """Append one token to every row.

        Args:
            tokens: [count] token of each row; -1 for rows without one.
            log_probs: [count].
            versions: [variants] version of the weights of each variant of the model.
            rows: the running rows.

        Returns:
            The slots of rows that may have ended: at their limit, with a token that stops some row, or because they search their text.
        """
        now = slice(self.count)
        if self._steps == _STEPS:
            self._read_all(rows)
        due = versions[self.variants[now]]
        if (self._versions[now] != due).any():
            self._begin_version(tokens, due, rows)
        self._log[self._steps, 0, now], self._log[self._steps, 1, now] = tokens, log_probs
        self._steps += 1
        self.lengths[now] += 1
        if tokens.min() >= 0:
            self.last[now] = tokens
            ended = (self.lengths[now] >= self.limits[now]) | self._stops[tokens] | self._texts[now]
            return np.flatnonzero(ended).tolist()
        has = tokens >= 0
        without = np.flatnonzero(~has)  # these have nothing to read: they joined after the step before
        self._read[without] = self._steps
        self.lengths[without] -= 1
        self.last[now][has] = tokens[has]
        ended = (self.lengths[now] >= self.limits[now]) | self._stops[self.last[now]] | self._texts[now]
        return np.flatnonzero(ended & has).tolist()

    def _read_all(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.read(row)
        self._steps = 0
        self._read[:] = 0

    def _begin_version(self, tokens: np.ndarray, due: np.ndarray, rows: Sequence[Row]) -> None:
        for slot in np.flatnonzero((self._versions[: self.count] != due) & (tokens >= 0)).tolist():
            rows[slot].begin_version(int(due[slot]))
            self._versions[slot] = due[slot]

    def _grow(self, size: int) -> None:
        more = size - len(self.lengths)
        pads = ((0, 0), (0, more)), ((0, more),), ((0, more),), ((0, 0), (0, 0), (0, more))
        arrays = self._integers, self.temperatures, self._texts, self._log
        self._allocate(*(np.pad(array, pad) for array, pad in zip(arrays, pads, strict=True)))

    def _allocate(self, integers: np.ndarray, temperatures: np.ndarray, texts: np.ndarray, log: np.ndarray) -> None:
        self._integers, self.temperatures, self._texts, self._log = integers, temperatures, texts, log
        self.lengths, self.limits, self.last, self.keys, self.variants, self._versions, self._read = integers
