"""The language of conditions.

A condition is a line of text that can be printed, stored with a checkpoint, and evaluated again on another machine. It compares
facts on the left with values on the right::

    gpu.sm >= 100
    train.precision == bf16 and model.moe
    engine.attention in {fa3, triton} or not plugin.mine

Operators are ``== != >= <= > <``, ``in {a, b}``, ``not in {a, b}``, ``not``, ``and``, ``or`` and parentheses; a bare
name holds unless the value is false, 0, none or empty. Values are words, numbers, ``true``, ``false`` and ``none``;
versions such as ``0.5.10`` compare as versions. Evaluation is lazy from left to right and has four outcomes (``Truth``),
because a fact may be unknown on this host or not applicable to this run. Both behave like the third value of Kleene's
logic. If both occur, the result is unknown, so that a rule that a worker would find violated is not dropped here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from miles_core.errors import PluginError
from miles_core.plugin.facts import Fact, State, show

Lookup = Callable[[str], Fact]

_TOKEN = re.compile(r"\s*(>=|<=|==|!=|>|<|[(){},]|[A-Za-z0-9_.*/:+\-]+)")
_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*\Z")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\Z")
_VERSION = re.compile(r"\d+(\.\d+)+\S*\Z")
_WORDS = {"true": True, "false": False, "none": None}
_KEYWORDS = {"and", "or", "not", "in", *_WORDS}
_COMPARISONS = ("==", "!=", ">=", "<=", ">", "<")


class RuleError(PluginError):
    """A condition that cannot be parsed, or that orders values without an order."""


class UnknownFact(RuleError):
    """A condition names a fact that no part of the program defines."""

    def __init__(self, name: str, hint: str) -> None:
        super().__init__(f"there is no fact {name!r}" + (f"; {hint}" if hint else ""))
        self.name = name
        self.hint = hint


class Truth(Enum):
    """The result of evaluating a condition on this host."""

    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"
    VACUOUS = "vacuous"

    def __invert__(self) -> Truth:
        return {Truth.TRUE: Truth.FALSE, Truth.FALSE: Truth.TRUE}.get(self, self)


@dataclass(frozen=True)
class Compare:
    """``name op values``; ``op`` is a comparison, ``in``, ``not in`` or ``""`` for a bare name."""

    name: str
    op: str = ""
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if not self.op:
            return self.name
        if self.op.endswith("in"):
            return f"{self.name} {self.op} {{{', '.join(map(show, self.values))}}}"
        return f"{self.name} {self.op} {show(self.values[0])}"


@dataclass(frozen=True)
class Not:
    """Negation."""

    part: Condition

    def __str__(self) -> str:
        return f"not {_parenthesize(self.part)}"


@dataclass(frozen=True)
class Join:
    """Two or more parts joined by ``op``, which is ``and`` or ``or``."""

    op: str
    parts: tuple[Condition, ...]

    def __str__(self) -> str:
        return f" {self.op} ".join(map(_parenthesize, self.parts))


Condition = Compare | Not | Join


def _parenthesize(part: Condition) -> str:
    return f"({part})" if isinstance(part, Join) else str(part)


@lru_cache(maxsize=4096)
def parse(text: str) -> Condition:
    """Parse a condition.

    Raises:
        RuleError: the text is malformed; names the position and what was expected there.
    """
    return _Reader(text).read()


def parse_literal(word: str) -> Any:
    """Convert a word of the language to its value: ``true``, ``false``, ``none``, a number, or the word itself."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.match(word):
        return float(word) if any(c in word for c in ".eE") else int(word)
    return word


class _Reader:
    """Recursive-descent parser of one condition."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise RuleError(f"condition {text!r}: cannot read {text[at:].strip()[:12]!r}")
            self.tokens.append(match.group(1))
            at = match.end()
        self.at = 0

    def read(self) -> Condition:
        result = self.read_join("or")
        if self.at < len(self.tokens):
            raise self.make_error("'and', 'or' or the end")
        return result

    def read_join(self, op: str) -> Condition:
        parts: list[Condition] = []
        while not parts or self.take(op):
            parts.append(self.read_join("and") if op == "or" else self.read_negation())
        return parts[0] if len(parts) == 1 else Join(op, tuple(parts))

    def read_negation(self) -> Condition:
        if self.take("not"):
            return Not(self.read_negation())
        if self.take("("):
            inner = self.read_join("or")
            self.need(")")
            return inner
        return self.read_test()

    def read_test(self) -> Condition:
        name = self.peek()
        if not _NAME.match(name) or name in _KEYWORDS:
            raise self.make_error("the name of a fact")
        self.at += 1
        for op in _COMPARISONS:
            if self.take(op):
                return Compare(name, op, (self.read_value(),))
        op = "not in" if self.peek() == "not" else "in"
        if op == "not in":
            self.at += 1
            if self.peek() != "in":
                raise self.make_error("'in'")
        if not self.take("in"):
            return Compare(name)
        self.need("{")
        values = [self.read_value()]
        while self.take(","):
            values.append(self.read_value())
        self.need("}")
        return Compare(name, op, tuple(values))

    def read_value(self) -> Any:
        word = self.peek()
        if not word or word in "(){}," or word in _COMPARISONS or word in _KEYWORDS - _WORDS.keys():
            raise self.make_error("a value")
        self.at += 1
        return parse_literal(word)

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, token: str) -> bool:
        matches = self.peek() == token
        self.at += matches
        return matches

    def need(self, token: str) -> None:
        if not self.take(token):
            raise self.make_error(repr(token))

    def make_error(self, what: str) -> RuleError:
        actual = repr(self.peek()) if self.peek() else "the end"
        return RuleError(f"condition {self.text!r}: expected {what}, found {actual}")


def names(condition: Condition) -> Iterator[str]:
    """Yield the names of the facts in a condition, from left to right."""
    if isinstance(condition, Compare):
        yield condition.name
    else:
        for part in (condition.part,) if isinstance(condition, Not) else condition.parts:
            yield from names(part)


def conjuncts(condition: Condition) -> tuple[Condition, ...]:
    """Return the operands of a top-level ``and``, or else the condition itself."""
    return condition.parts if isinstance(condition, Join) and condition.op == "and" else (condition,)


def evaluate(condition: Condition | str, lookup: Lookup) -> Truth:
    """Whether a condition holds.

    Args:
        condition: a parsed condition or text; empty text holds.
        lookup: returns the fact with a given name, in any state.

    Raises:
        UnknownFact: evaluation reached an undefined name.
        RuleError: the text cannot be parsed, or values without an order are ordered.
    """
    if isinstance(condition, str):
        if not condition.strip():
            return Truth.TRUE
        condition = parse(condition)
    if isinstance(condition, Not):
        return ~evaluate(condition.part, lookup)
    if isinstance(condition, Join):
        return _join(condition, lookup)
    return _test(condition, lookup(condition.name))


def _join(condition: Join, lookup: Lookup) -> Truth:
    decisive, neutral = (Truth.FALSE, Truth.TRUE) if condition.op == "and" else (Truth.TRUE, Truth.FALSE)
    seen = set()
    for part in condition.parts:
        truth = evaluate(part, lookup)
        if truth is decisive:
            return decisive
        seen.add(truth)
    for weaker in (Truth.UNKNOWN, Truth.VACUOUS):
        if weaker in seen:
            return weaker
    return neutral


def _test(test: Compare, fact: Fact) -> Truth:
    if fact.state is State.NO_SUCH_NAME:
        raise UnknownFact(test.name, fact.origin)
    if fact.state is State.UNKNOWN:
        return Truth.UNKNOWN
    if fact.state is State.NOT_APPLICABLE:
        return Truth.VACUOUS
    return Truth.TRUE if _holds(test, fact.value) else Truth.FALSE


def _holds(test: Compare, value: Any) -> bool:
    if not test.op:
        return bool(value) and value != "none"
    if test.op in ("==", "in"):
        return any(same(value, v) for v in test.values)
    if test.op in ("!=", "not in"):
        return not any(same(value, v) for v in test.values)
    if value is None:
        return False
    left, right = _make_comparable(test, value, test.values[0])
    return bool({">=": left >= right, "<=": left <= right, ">": left > right, "<": left < right}[test.op])


def same(value: Any, other: Any) -> bool:
    """Equality in the language of conditions: 1 is not true, a word equals the number spelt like it, None equals ``none``."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    if isinstance(value, str) or isinstance(other, str):
        return show(value) == show(other)
    return bool(value == other)


def _make_comparable(test: Compare, value: Any, bound: Any) -> tuple[Any, Any]:
    if _is_number(value) and _is_number(bound):
        return value, bound
    if _VERSION.match(str(value)) and (_is_number(bound) or _VERSION.match(str(bound))):
        from packaging.version import Version

        return Version(str(value)), Version(str(bound))
    raise RuleError(f"condition {str(test)!r}: {test.name} = {show(value)} has no order against {show(bound)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
