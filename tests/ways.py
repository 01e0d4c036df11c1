"""Traces the way of a thing through our packages: the functions that it passes, in order.

A *way* runs past landmarks, the functions in which the thing changes. Its stops are the functions of our packages that are active at a
landmark (on the stack, awaiting coroutines included), in the order in which they were first active; comprehensions count as part of
their function. The way of an error has other stops: functions that catch it, and functions that receive it as an argument.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
_ANONYMOUS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


@lru_cache(None)
def name_of(code: CodeType) -> str:
    """Return ``file.function`` of code in one of our packages, else an empty text."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "tests") or code.co_qualname.endswith(_ANONYMOUS):
        return ""
    return f"{path.stem}.{code.co_qualname.replace('.<locals>', '')}"


def stack(frame: FrameType | None) -> Iterator[str]:
    """Yield the names of the active functions of our packages, outermost first."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return filter(None, (name_of(each.f_code) for each in reversed(frames)))


class Trace:
    """The calls of one step.

    Attributes:
        files: files of our packages with a function that was called.
        calls: number of calls.
        stacks: for each landmark that was passed, in order, its name and the active functions.
    """

    def __init__(self, landmarks: Sequence[str]) -> None:
        self.landmarks, self.files, self.calls = tuple(landmarks), set[str](), 0
        self.stacks: list[tuple[str, list[str]]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(ROOT):
            self.calls += 1
            self.files.add(frame.f_code.co_filename)
            if (name := name_of(frame.f_code)) in self.landmarks:
                self.stacks.append((name, [*stack(frame)]))

    def way(self, start: str) -> list[str]:
        """Return the stops from the function ``start`` past all landmarks in their order; each must have been passed."""
        stops: dict[str, None] = {}
        left = iter(self.landmarks)
        landmark: str | None = next(left)
        for name, active in self.stacks:
            if name == landmark:
                stops |= dict.fromkeys(active[active.index(start) :] if start in active else active)
                landmark = next(left, None)
        assert landmark is None, f"{landmark} was not called, or not after the landmarks before it"
        return [*stops]


@contextmanager
def traced(trace: Trace) -> Iterator[Trace]:
    """Trace the body."""
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)


class ErrorTrace:
    """Records the functions that handle an error. Call ``begin`` with the error immediately before it is raised."""

    def __init__(self) -> None:
        self.stops: dict[str, None] = {}
        self._error: BaseException | None = None

    def begin(self, error: BaseException) -> None:
        """Start with ``error``."""
        self._error = error
        sys.settrace(self._trace)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace = self._trace
            frame = frame.f_back

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not (name := name_of(frame.f_code)):
            return self._trace
        if event == "call" and any(value is self._error for value in frame.f_locals.values()):
            self.stops[name] = None
        caught = event == "line" and self._error is sys.exc_info()[1] and _in_handler(frame)
        if caught:
            self.stops[name] = None
        return self._trace


def _in_handler(frame: FrameType) -> bool:
    return any(start <= frame.f_lineno <= end for start, end in _handlers(frame.f_code.co_filename))


@lru_cache(None)
def _handlers(file: str) -> list[tuple[int, int]]:
    """Return the first and last lines of the bodies of all ``except`` clauses of a file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return [(node.body[0].lineno, node.end_lineno or 0) for node in handlers]
