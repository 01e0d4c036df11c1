"""The function of a process that encodes and writes samples, so that the training loop does not wait for it. It imports neither torch nor a
tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from miles_core.errors import MilesError
from miles_tools.samples.rows import JoinedRows, pack
from miles_workers.object_reader import ReaderEnded

#: Number of tokens for which another writer process is started.
SHARE = 1 << 17
#: Makes the function of the processes.
WRITER = "miles_tools.samples.process:PartWriter"


@dataclass(frozen=True)
class Message:
    """Rows to write to one file.

    Attributes:
        path: the file.
        rows: the samples.
        pieces: texts of tokens that no earlier message contained, by token id.
        secrets: texts to remove.
    """

    path: Path
    rows: JoinedRows
    pieces: dict[int, str]
    secrets: Sequence[str]


class PartWriter:
    """Call it with a ``Message`` to write its file."""

    def __init__(self) -> None:
        self._pieces: dict[int, str] = {}

    def __call__(self, message: Message) -> None:
        """Raises OSError if the file cannot be written."""
        self._pieces |= message.pieces
        message.path.write_bytes(pack(message.rows.split(), self._pieces, message.secrets))


@contextmanager
def name_failures() -> Iterator[None]:
    """Context in which errors of processes that save samples become a MilesError that names them. An OSError is passed on."""
    try:
        yield
    except ReaderEnded as ended:
        raise MilesError(
            f"the process that saves samples {ended}; resume the run, or resume it with --no-save-rollouts"
        ) from ended
    except MilesError as error:
        raise MilesError(f"the process that saves samples failed: {error}") from error
