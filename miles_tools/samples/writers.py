"""Writes samples in other processes (``process``). Samples that stay where they were produced are read there; the driver sends references.

A process has no tokenizer: it requests the texts of tokens that it has not seen, each token once in a run.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import chain, groupby
from pathlib import Path

import numpy as np

from miles_core.errors import MilesError
from miles_core.redact import secrets
from miles_tools.samples.files import join_parts, part_files
from miles_tools.samples.rows import JoinedRows, Pieces, Saved, divide
from miles_workers.object_reader import LocalReader, ObjectReader, ReaderEnded, open_reader
from miles_workers.object_ref import Stored
from miles_workers.remote_sample import Run, is_reference, pack_run, split_runs
from miles_workers.remote_tokens import RemoteTokens

#: Samples that are prepared before the event loop continues with other tasks.
_AT_ONCE = 64
#: Number of tokens for which another process is started.
SHARE = 1 << 17
#: Entries that such a share consists of, at least, if the driver has read its samples.
_PARTS = 8
#: Tokens whose texts are looked up before the event loop continues with other tasks.
_LOOKUPS = 128
#: Makes the function of the processes.
WRITER = "miles_tools.samples.process:RowWriter"

#: Samples of one group that are sent together, and saved by the same process.
_RUN = 16

#: Values that training recorded for the samples of a run: their reference and the position of the first one there; or log-probs and advantages of
#: each sample.
Recorded = tuple[Stored, int] | list[tuple[np.ndarray | None, np.ndarray | None]]
#: A run of samples with recorded values and the name of its evaluation set; or rows, if the driver has read the samples.
Entry = tuple[Run, Recorded | None, str] | JoinedRows


async def make_entries(step: int, samples: Sequence[Saved]) -> list[tuple[Entry, int]]:
    """Return what is sent of the samples, each entry with its number of tokens."""
    entries: list[tuple[Entry, int]] = []
    for start in range(0, len(samples), _AT_ONCE):
        for refers, some in groupby(samples[start : start + _AT_ONCE], lambda saved: is_reference(saved[0])):
            entries += (_refer if refers else _read)(step, [*some])
        await asyncio.sleep(0)
    return entries


def _read(step: int, samples: Sequence[Saved]) -> Iterator[tuple[Entry, int]]:
    """Return the rows of samples, divided so that several processes can have equal shares."""
    sizes = [len(sample.tokens) for sample, _, _ in samples]
    for part in divide(sizes, 1 + _PARTS * sum(sizes) // SHARE):
        rows = JoinedRows.of(step, samples[part])
        yield rows, rows.size


def _refer(_: int, samples: Sequence[Saved]) -> Iterator[tuple[Entry, int]]:
    """Return one entry for each run of ``split_runs``, more where data sets or the places of recorded values differ."""
    at = 0
    for run in split_runs([sample for sample, _, _ in samples], _RUN, is_reference):
        some, start = samples[at : at + len(run)], 0
        at += len(run)
        for end in range(1, len(some) + 1):
            if end == len(some) or not _continues(some[end - 1], some[end]):
                part = some[start:end]
                size = sum(1 + sample.prompt_length + sample.response_length for sample, _, _ in part)
                yield (pack_run([sample for sample, _, _ in part]), _recorded(part), part[0][2]), size
                start = end


def _continues(one: Saved, other: Saved) -> bool:
    left, right = one[1], other[1]
    if one[2] != other[2] or type(left) is not type(right):
        return False
    if isinstance(left, RemoteTokens) and isinstance(right, RemoteTokens):
        return left.group is right.group and left.position + 1 == right.position
    return True


def _recorded(run: Sequence[Saved]) -> Recorded | None:
    first = run[0][1]
    if isinstance(first, RemoteTokens):
        return first.group.stored, first.position
    return None if first is None else [(each.log_probs, each.advantages) for _, each, _ in run if each is not None]


def _stored(entries: Sequence[Entry]) -> Stored | None:
    """Return one of the object references that the entries refer to; None if the driver has read all samples."""
    return next((entry[0][0] for entry in entries if not isinstance(entry, JoinedRows)), None)


@contextmanager
def _name_failures() -> Iterator[None]:
    """Context in which errors of the processes become a MilesError that names them. An OSError is passed on."""
    try:
        yield
    except ReaderEnded as ended:
        raise MilesError(
            f"the process that saves samples {ended}; resume the run, or resume it with --no-save-rollouts"
        ) from ended
    except MilesError as error:
        raise MilesError(f"the process that saves samples failed: {error}") from error


class Writers:
    """Writes files in other processes. Each process encodes and compresses a part.

    Args:
        pieces: texts of tokens.
        most: maximum number of processes.

    Attributes:
        texts: passes requests for texts to the thread that owns the tokenizer.
    """

    def __init__(self, pieces: Pieces, most: int) -> None:
        self.texts = TextRequests(pieces)
        self._most = most
        self._readers: dict[bool, list[ObjectReader]] = {}  # those that read other processes' objects, and the others

    def write(self, part: Path, step: int, entries: list[tuple[Entry, int]]) -> None:
        """Write the samples of ``make_entries`` to ``part``. Called in another thread than that of ``texts``. Empties ``entries`` once they
        are sent. The messages then hold the samples, so the process that reads them last frees the gigabytes instead of the driver.

        Raises:
            OSError: the file cannot be written.
            MilesError: a process has ended, or samples cannot be read.
        """
        sizes = [size for _, size in entries]
        listed = [entry for entry, _ in entries]
        shares = [listed[share] for share in divide(sizes, min(self._most, 1 + sum(sizes) // SHARE))]
        stored = _stored(listed)
        readers = self._readers.setdefault(stored is not None, [])
        while len(readers) < len(shares):
            readers.append(LocalReader(WRITER) if stored is None else open_reader(stored, WRITER))
        files, busy = part_files(part, len(shares)), readers[: len(shares)]
        with _name_failures():
            for reader, share, file in zip(busy, shares, files, strict=True):
                packed = [entry.pack() if isinstance(entry, JoinedRows) else entry for entry in share]
                reader.send((file, step, packed, secrets(os.environ)))
            del share, packed
            shares.clear()
            listed.clear()
            entries.clear()
            for reader in busy:
                if (unknown := reader.receive()) is not None:
                    reader.send(self.texts.fetch(unknown))
                    reader.receive()
        join_parts(files)

    def close(self) -> None:
        """End the processes."""
        for reader in chain.from_iterable(self._readers.values()):
            reader.close()
        self._readers = {}


class TextRequests:
    """Lets the thread that owns the tokenizer look up texts for another one: in its event loop, a few at a time, so that the loop stays
    responsive; in ``wait_for`` when the loop has ended.

    Attributes:
        loop: the event loop.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._requests: queue.SimpleQueue[tuple[np.ndarray, Future[dict[int, str]]] | None] = queue.SimpleQueue()
        self.loop: asyncio.AbstractEventLoop | None = None

    def fetch(self, tokens: Sequence[int]) -> dict[int, str]:
        """Return the texts of tokens. Called in another thread."""
        found: dict[int, str] = {}
        for start in range(0, len(tokens), _LOOKUPS):
            answer: Future[dict[int, str]] = Future()
            self._requests.put((np.array(tokens[start : start + _LOOKUPS], np.int32), answer))
            with suppress(RuntimeError):  # the event loop has ended
                if self.loop is not None:
                    self.loop.call_soon_threadsafe(self._look_up)
            found |= self._result(answer)
        return found

    def wait_for(self, pending: Future[None]) -> None:
        """Look up texts until ``pending`` is done, without an event loop. Errors of ``pending`` are not raised."""
        pending.add_done_callback(lambda _: self._requests.put(None))
        while (request := self._requests.get()) is not None:
            self._answer(*request)

    @staticmethod
    def _result(answer: Future[dict[int, str]]) -> dict[int, str]:
        """Wait for the answer unless the program ends, which waits for this thread."""
        while threading.main_thread().is_alive():
            with suppress(TimeoutError):
                return answer.result(1.0)
        raise MilesError("the run ended before its last samples were saved")

    def _look_up(self) -> None:
        with suppress(queue.Empty):
            if (request := self._requests.get_nowait()) is not None:
                self._answer(*request)

    def _answer(self, tokens: np.ndarray, answer: Future[dict[int, str]]) -> None:
        try:
            self._pieces.add(tokens)
            answer.set_result({token: self._pieces[token] for token in tokens.tolist()})
        except Exception as error:
            answer.set_exception(error)
