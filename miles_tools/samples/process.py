"""A process that encodes and writes samples, so that the training loop does not wait for it.

The driver sends messages on its standard input and reads one answer to each on its standard output, both as pickles. The process ends
with the driver: its input ends then. It imports neither torch nor a tokenizer.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.errors import MilesError
from miles_tools.samples.rows import JoinedRows, pack

#: Number of tokens for which another writer process is started.
SHARE = 1 << 17


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


class WriterProcess:
    """A running writer. ``known`` is the number of token texts that it has received."""

    def __init__(self) -> None:
        self.known = 0
        home = str(Path(__file__).parents[2])
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],  # -P: files of the working directory must not replace modules
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def send(self, message: Message) -> None:
        """Send rows; ``wait`` must follow. Raises MilesError if the process has ended."""
        try:
            assert self._process.stdin is not None
            pickle.dump(message, self._process.stdin, protocol=5)
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error

    def wait(self) -> None:
        """Wait until the file of the last message is complete.

        Raises:
            OSError: it cannot be written.
            MilesError: the process has ended, or encoding failed.
        """
        try:
            assert self._process.stdout is not None
            answer = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise self._ended() from error
        if isinstance(answer, OSError):
            raise answer
        if answer is not None:
            raise MilesError(f"the process that saves samples failed: {answer}")

    def close(self) -> None:
        """End the process. It has no message left."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # the process has ended, and the rest of a message cannot be written
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ended(self) -> MilesError:
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return MilesError(f"the process that saves samples {how}; resume the run, or resume it with --no-save-rollouts")


def main() -> None:
    """Write the files of all messages until the input ends."""
    for each in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a run; the driver decides when to end
        signal.signal(each, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints must not disturb the answers
    pieces: dict[int, str] = {}
    while True:
        try:
            message: Message = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):
            return
        answer: Any = None
        try:
            pieces |= message.pieces
            message.path.write_bytes(pack(message.rows.split(), pieces, message.secrets))
        except OSError as error:
            answer = OSError(error.errno, error.strerror)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
