"""A reason why a run cannot start, and how all of them read on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.plugin.facts import Fact, State, show


@dataclass(frozen=True)
class Problem:
    """One reason why a run cannot start, read as ``who verb needs``.

    Attributes:
        who: who demands it, e.g. ``mine`` or ``mine rollout x bf16 train``.
        needs: what is demanded.
        because: the reason, word for word from the manifest.
        values: the facts at issue, each (name, value, origin).
        verb: what joins ``who`` and ``needs``.
        choices: names of facts a fix may change.
        tries: returns changes of facts that may solve it, fact -> value each; those that the checker accepts are shown. Called once,
            for a run that is refused.
    """

    who: str
    needs: str
    because: str
    values: tuple[tuple[str, str, str], ...] = ()
    verb: str = "needs"
    choices: tuple[str, ...] = ()
    tries: Callable[[], Iterable[Mapping[str, Any]]] = field(default=tuple, compare=False)

    @property
    def headline(self) -> str:
        """The first line: what is wrong."""
        return " ".join(part for part in (self.who, self.verb, self.needs) if part)


@dataclass(frozen=True)
class Review:
    """What a plugin worked out about a run before it starts (``Plugin.review``).

    Attributes:
        notes: blocks of text that the plan shows, the first line a heading.
        problems: why the run cannot start.
    """

    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def described(fact: Fact) -> tuple[str, str, str]:
    """A fact as a problem shows it: name, value, origin."""
    value = show(fact.value) if fact.state is State.KNOWN else fact.state.value
    return fact.name, value, fact.origin


def refusal(problems: Sequence[Problem], fixes: Sequence[str] | None, title: str = "this run cannot start") -> str:
    """Every problem with its values and reason, then the fixes that were tried and hold.

    ``fixes`` is None where none were looked for. The caller prints ``error: `` before it.
    """
    count = f"{len(problems)} problem" + ("s" if len(problems) != 1 else "")
    blocks = [f"{title} ({count})"]
    for problem in problems:
        lines = [f"  x {problem.headline}"]
        wide = max((len(f"{name} = {value}") for name, value, _ in problem.values), default=0)
        lines += [f"    | {f'{name} = {value}'.ljust(wide)}   {origin}" for name, value, origin in problem.values]
        lines += [f"    | because {line}" for line in problem.because.splitlines()]
        blocks.append("\n".join(lines))
    if fixes and len(fixes) == 1:
        blocks.append(f"  this would do:\n    {fixes[0]}")
    elif fixes:
        blocks.append("  any one of these would do:\n" + "\n".join(f"    {fix}" for fix in fixes))
    elif fixes is not None:
        blocks.append("  no small change would do: each of these has to be resolved")
    return "\n\n".join(blocks)
