"""Traces the way of a thing through our packages: the functions that it passes, in order.

A *way* runs past landmarks, the functions in which the thing is made or changed. Its stops are the functions of our packages that are
active at a landmark (on the stack, awaiting coroutines included), in the order in which they were first active, without those that were
active before the first landmark. Comprehensions count as part of their function. The stops of an error are the functions that catch it or
receive it as an argument.
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
_PARTS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


@lru_cache(None)
def name_of(code: CodeType) -> str:
    """Return ``module.function`` of code in one of our packages, else an empty text."""
    path = Path(code.co_filename)
    ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0].startswith(("miles_", "plugins"))
    if not ours or code.co_qualname.endswith(_PARTS):
        return ""
    return f"{path.stem}.{code.co_qualname.replace('.<locals>', '')}"


def active(frame: FrameType | None) -> list[str]:
    """Return the names of the active functions of our packages, outermost first."""
    names: list[str] = []
    while frame is not None:
        names.append(name_of(frame.f_code))
        frame = frame.f_back
    return [name for name in reversed(names) if name]


class Trace:
    """The functions that are called while the body of ``recording`` runs.

    Attributes:
        files: files of our packages with a function that was called.
        passed: for each landmark that was passed, in order, its name and the active functions.
    """

    def __init__(self, landmarks: Sequence[str]) -> None:
        self.files = set[str]()
        self.passed: list[tuple[str, list[str]]] = []
        self._landmarks = frozenset(landmarks)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record during the body."""
        sys.setprofile(self._record)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (name := name_of(frame.f_code)):
            self.files.add(frame.f_code.co_filename)
            if name in self._landmarks:
                self.passed.append((name, active(frame)))

    def way(self, landmarks: Sequence[str]) -> list[str]:
        """Return the stops of the way past ``landmarks``, which must have been passed in this order."""
        stops: dict[str, None] = {}
        before: frozenset[str] | None = None
        left = [*landmarks]
        for name, functions in self.passed:
            if left and name == left[0]:
                left.pop(0)
                before = frozenset(functions[:-1]) if before is None else before
                stops |= dict.fromkeys(each for each in functions if each not in before)
        assert not left, f"{left[0]} was not called after the landmarks before it"
        return [*stops]


class ErrorTrace:
    """Records the functions that handle an error.

    Attributes:
        stops: the functions, in order.
    """

    def __init__(self) -> None:
        self.stops: dict[str, None] = {}
        self._error: BaseException | None = None

    def begin(self, error: BaseException) -> None:
        """Start to record. Called immediately before ``error`` is raised."""
        self._error = error
        sys.settrace(self._record)
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            frame.f_trace = self._record
            frame = frame.f_back

    def end(self) -> None:
        """Stop recording."""
        sys.settrace(None)

    def _record(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        name = name_of(frame.f_code)
        if not name or name.endswith("__"):  # a method of the error itself
            return self._record
        received = event == "call" and any(value is self._error for value in frame.f_locals.values())
        if received or (event == "line" and sys.exc_info()[1] is self._error and _in_handler(frame)):
            self.stops[name] = None
        return self._record


def _in_handler(frame: FrameType) -> bool:
    return any(first <= frame.f_lineno <= last for first, last in _handlers(frame.f_code.co_filename))


@lru_cache(None)
def _handlers(file: str) -> list[tuple[int, int]]:
    """Return the first and last lines of the bodies of all ``except`` clauses of a file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return [(node.body[0].lineno, node.end_lineno or 0) for node in handlers]
