"""Where the seconds of a process go: exclusive times of named methods, waits for the GPU, and a sampling profiler."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.measure import ROOT

#: Methods that make the host wait for a GPU that still computes their tensor.
_READS = ("item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__")
#: Innermost functions of threads that wait for others.
_IDLE = frozenset({"wait", "select", "poll", "get", "_worker", "readline", "accept", "_bootstrap", "sample_threads"})


class TimeSplit:
    """Exclusive seconds per phase: the time inside a method counts for its own phase, not for that of its callers.

    Args:
        clock: returns seconds.

    Attributes:
        seconds: phase -> seconds since ``take``.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)
        self._local = threading.local()

    def wrap(self, owner: type, names: Sequence[str], phase: str) -> None:
        """Count the time in these methods as ``phase``."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name), phase))

    def watch_gpu(self, phase: str) -> None:
        """Count the time in which the host waits for results of the GPU as ``phase``."""
        for name in _READS:
            inner = getattr(torch.Tensor, name)
            timed = self._timed(inner, phase)
            setattr(torch.Tensor, name, _only_cuda(inner, timed))
        self.wrap(torch.cuda.Event, ["synchronize"], phase)

    def take(self) -> dict[str, float]:
        """Return the seconds per phase, and start again from zero."""
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken

    def _timed(self, inner: Any, phase: str) -> Any:
        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            stack = self._local.__dict__.setdefault("stack", [])
            now = self.clock()
            if stack:
                self.seconds[stack[-1][0]] += now - stack[-1][1]
            stack.append([phase, now])
            try:
                return inner(*args, **kwargs)
            finally:
                now = self.clock()
                _, since = stack.pop()
                self.seconds[phase] += now - since
                if stack:
                    stack[-1][1] = now

        return timed


def _only_cuda(inner: Any, timed: Any) -> Any:
    @functools.wraps(inner)
    def method(self: Any, *args: Any) -> Any:
        return timed(self, *args) if self.is_cuda else inner(self, *args)

    return method


class Profile:
    """Samples of the stacks of all threads that do not wait."""

    def __init__(self) -> None:
        self.samples = 0
        self.leaves: Counter[str] = Counter()
        self.inside: Counter[str] = Counter()

    def add(self, frame: Any) -> None:
        """Count one stack."""
        if frame.f_code.co_name in _IDLE:
            return
        self.samples += 1
        self.leaves[f"{_name(frame)}:{frame.f_lineno}"] += 1
        functions = set()
        while frame is not None:
            functions.add(_name(frame))
            frame = frame.f_back
        self.inside.update(functions)

    def table(self, rows: int = 30) -> Mapping[str, Any]:
        """Return the share of samples per innermost line, and per function of this repository with what it calls."""
        total = max(self.samples, 1)
        own = [(name, count) for name, count in self.inside.most_common() if name.startswith(("miles_", "plugins"))]
        return {
            "samples": self.samples,
            "lines": {name: round(count / total, 4) for name, count in self.leaves.most_common(rows)},
            "functions": {name: round(count / total, 4) for name, count in own[:rows]},
        }


@contextmanager
def sample_threads(interval: float = 1e-3) -> Iterator[Profile]:
    """Sample the stacks of this process's other threads every ``interval`` seconds. Long calls without the interpreter count once."""
    profile, ended, own = Profile(), threading.Event(), []
    switch = sys.getswitchinterval()

    def work() -> None:
        own.append(threading.get_ident())
        while not ended.wait(interval):
            for ident, frame in sys._current_frames().items():
                if ident not in own:
                    profile.add(frame)

    thread = threading.Thread(target=work, daemon=True)
    sys.setswitchinterval(interval / 4)
    thread.start()
    try:
        yield profile
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(switch)


def _name(frame: Any) -> str:
    code = frame.f_code
    path = code.co_filename.removeprefix(f"{ROOT}/")
    return (
        f"{path.rpartition('site-packages/')[2]}:{code.co_qualname if hasattr(code, 'co_qualname') else code.co_name}"
    )
