"""Work in a process of its own that does not import everything again: it is forked from this one, which has imported the packages.

Imports take seconds to half a minute, which a benchmark of six modes would pay six times. The parent must not use a GPU: CUDA does not survive a
fork. Each child has its own GPU context and memory, and its end frees both. Measure a CPU's resident memory in a new interpreter instead: a forked
child starts with its parent's pages.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

#: Lets ``torch.cuda.is_available`` ask the driver's management library, which leaves CUDA itself alone.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def in_fork(work: Callable[[], Any]) -> Any:
    """Call ``work`` in a forked process.

    Returns:
        its result, which must be JSON; ``{"failed": exit code}`` if it failed, with the error on standard error.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise SystemExit(
            "this process uses a GPU already, and CUDA does not survive a fork: do that work in a fork, too"
        )
    reader, writer = os.pipe()
    sys.stdout.flush(), sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's idle threads
        child = os.fork()
    if child == 0:
        os.close(reader)
        os._exit(_answer(work, writer))
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(text) if code == 0 else {"failed": code}


def _answer(work: Callable[[], Any], writer: int) -> int:
    try:
        result = json.dumps(work())
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    with os.fdopen(writer, "w", encoding="utf-8") as pipe:
        pipe.write(result)
    sys.stdout.flush(), sys.stderr.flush()
    return 0


class Clock:
    """Prints progress with the seconds since the script started, and keeps the seconds of each phase."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.phases: dict[str, float] = {}

    def note(self, phase: str) -> None:
        """End a phase."""
        now = time.perf_counter()
        self.phases[phase] = round(now - self.last, 3)
        self.last = now
        print(f"{now - self.start:7.1f} s  {phase} ({self.phases[phase]} s)", file=sys.stderr, flush=True)
