"""Problems that prevent a run from starting, and their formatting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_core.plugin.facts import Fact, State, show


@dataclass(frozen=True)
class Problem:
    """One reason why a run cannot start, displayed as ``who verb needs``.

    Attributes:
        who: the component with the requirement, e.g. ``mine`` or ``mine rollout x bf16 train``.
        needs: the requirement.
        because: the reason, verbatim from the manifest.
        values: the facts involved, as (name, value, origin).
        verb: the verb between ``who`` and ``needs``.
        choices: names of the facts that a fix may change.
        tries: returns changes of facts (fact -> value) that may solve the problem; those that the checker accepts are shown. Called
            once for a rejected run.
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
        """The first line of the problem."""
        return " ".join(part for part in (self.who, self.verb, self.needs) if part)


@dataclass(frozen=True)
class Review:
    """The result of a plugin's ``review`` of a run (``Plugin.review``).

    Attributes:
        notes: blocks of text that the plan shows; the first line of each is a heading.
        problems: reasons why the run cannot start.
    """

    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def describe_fact(fact: Fact) -> tuple[str, str, str]:
    """Return (name, value, origin) of a fact, as used in ``Problem.values``."""
    value = (show(fact.value) or "none") if fact.state is State.KNOWN else fact.state.value
    return fact.name, value, fact.origin


def refusal(problems: Sequence[Problem], fixes: Sequence[str] | None, title: str = "this run cannot start") -> str:
    """Format problems with their values and reasons, followed by the accepted fixes.

    ``fixes`` is None if none were searched for. The caller prints ``error: `` before the text.
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
