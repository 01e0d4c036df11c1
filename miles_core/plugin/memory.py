"""Whether a run fits into the memory of its GPUs.

Backends compute what one GPU holds of each of their processes (``Plugin.memory``). Here these are put on the GPUs where they run, shown
as one table and compared with the GPU. In one process (``--runtime inline``) engine and trainer hold their memory together. With
``--colocate`` they take turns: one works while the other sleeps, and during a weight sync both hold their weights. Otherwise each has
GPUs of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from miles_core.plugin.facts import Facts
from miles_core.plugin.problem import Problem, described

GB = 1e9
#: Share of a GPU that PyTorch's allocator can fill; the rest is lost between its blocks.
USABLE = 0.95
#: Changes of options that a refusal tries for each process.
_TRIED = 6

Changes = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Parts:
    """Device memory of one process on one GPU, in bytes.

    Attributes:
        weights: of the model.
        draft: of a model that drafts.
        gradients, optimizer: of a trainer; the optimizer's state includes FP32 master weights.
        activations: at their peak.
        cache: keys and values.
        other: libraries, communication buffers and workspaces.
    """

    weights: float = 0.0
    draft: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    cache: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """All of them together."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Usage:
    """What one GPU holds of a backend's process.

    Attributes:
        kind: ``engine`` or ``trainer``.
        label: which process, e.g. ``"rank of stage 0"``.
        parts: while it works.
        asleep: bytes that it keeps while it sleeps.
        usable: share of the GPU that it can fill.
        note: where the numbers come from, one line.
        processes: that work together, one on each GPU; several are never in the driver's process.
        fitting: bytes that it may take next to what else is on the GPU, bytes that it may take alone -> changes of facts with which it
            takes no more, the smallest first. They may name other hardware too (``gpu.count``, ``gpu.machines``).
    """

    kind: str
    label: str
    parts: Parts
    asleep: float = 0.0
    usable: float = USABLE
    note: str = ""
    processes: int = 1
    fitting: Callable[[float, float], Changes] = lambda budget, alone: ()

    def synchronized(self) -> Usage:
        """During a weight sync: weights, and what sleeps least."""
        return replace(self, parts=Parts(weights=self.parts.weights, draft=self.parts.draft, other=self.asleep))


@dataclass(frozen=True)
class _Peak:
    """What one GPU holds at its fullest moment: one process that works, and bytes beside it."""

    usage: Usage
    beside: float
    why: str

    @property
    def total(self) -> float:
        return self.usage.parts.total + self.beside

    def room(self, gpu: float) -> float:
        """Bytes left for the process that works."""
        return self.usage.usable * gpu - self.beside


def review_memory(usages: Sequence[Usage], facts: Facts) -> tuple[list[str], list[Problem]]:
    """The table that the plan shows, and why the run does not fit.

    Args:
        usages: of all processes of one policy.
        facts: of the plan; nothing is compared where ``gpu.memory_gb`` is unknown or 0.
    """
    if not usages:
        return [], []
    memory = facts.lookup("gpu.memory_gb")
    gpu = float(memory.value or 0) * GB
    colocated = bool(facts.value("colocate"))
    inline = facts.value("runtime") == "inline" and all(usage.processes == 1 for usage in usages)
    peaks = list(_peaks(usages, colocated, inline))
    end = "  no GPU here to compare with: plan for some with --hardware 8xH200"
    if gpu:
        end = f"  a GPU has {gpu / GB:.0f} GB ({memory.origin})"
    where = "they take turns on the same GPUs"
    if not colocated:
        where = "they share one GPU" if inline else "each on GPUs of its own"
    kinds = {usage.kind for usage in usages}
    notes = [
        _table(usages),
        *(f"  {usage.note}" for usage in usages if usage.note),
        end + f"; {where}" * (len(kinds) > 1),
    ]
    over = [peak for peak in peaks if gpu and peak.room(gpu) < peak.usage.parts.total]
    over.sort(key=lambda peak: peak.total, reverse=True)
    first = {peak.usage.kind: peak for peak in reversed(over)}
    refused = sorted(first.values(), key=lambda peak: -peak.total) if colocated or not inline else over[:1]
    return ["\n".join(dict.fromkeys(notes))], [_problem(peak, usages, gpu, facts) for peak in refused]


def _peaks(usages: Sequence[Usage], colocated: bool, inline: bool) -> Iterable[_Peak]:
    for usage in usages:
        others = [other for other in usages if other.kind != usage.kind]
        if colocated and others:
            yield _Peak(usage, max(o.asleep for o in others), f"the sleeping {others[0].kind}")
            if usage.kind != "trainer":
                continue  # one row for both sides
            pushed = max((o.synchronized() for o in others), key=lambda o: o.parts.total)
            yield _Peak(usage.synchronized(), pushed.parts.total, f"the {pushed.kind} during a weight sync")
        elif inline and others:
            yield _Peak(usage, max(o.parts.total for o in others), f"the {others[0].kind}")
        else:
            yield _Peak(usage, 0.0, "")


def _problem(peak: _Peak, usages: Sequence[Usage], gpu: float, facts: Facts) -> Problem:
    usage = peak.usage
    beside = f", and {peak.beside / GB:.1f} for {peak.why}" if peak.beside else ""
    values = [
        described(facts.lookup("gpu.memory_gb")),
        (f"{usage.kind}, {usage.label}", f"{usage.parts.total / GB:.1f} GB", _listed(usage.parts) + beside),
    ]
    others = {other.kind: other for other in usages if other.kind != usage.kind and peak.beside}
    values += [(f"{o.kind}, {o.label}", f"{o.parts.total / GB:.1f} GB", _listed(o.parts)) for o in others.values()]
    because = f"{usage.usable:.0%} of a GPU can be filled" if usage.usable < 1 else "a GPU holds no more"

    def tries() -> Iterator[Mapping[str, Any]]:
        for one in (usage, *others.values()):
            beside = peak.beside if one is usage else usage.parts.total
            yield from islice(one.fitting(max(one.usable * gpu - beside, 0.0), one.usable * gpu), _TRIED)

    who = " and ".join(f"the {one.kind} {facts.value(one.kind)}" for one in (usage, *others.values()))
    verb = "need" if others else "needs"
    return Problem(
        who, f"{peak.total / GB / usage.usable:.0f} GB on each GPU", because, tuple(values), verb, tries=tries
    )


def _listed(parts: Parts) -> str:
    held = [(getattr(parts, field.name) / GB, field.name) for field in fields(Parts)]
    return " + ".join(f"{size:.1f} {name}" for size, name in held if size >= 0.05)


def _table(usages: Sequence[Usage]) -> str:
    """One row per kind of process; columns that are empty everywhere are left out."""
    shown = [field.name for field in fields(Parts) if any(getattr(u.parts, field.name) for u in usages)]
    rows = [["process", *shown, "in all", "asleep"]]
    for usage in usages:
        sizes = [getattr(usage.parts, name) for name in shown] + [usage.parts.total, usage.asleep]
        rows.append([f"{usage.kind}, {usage.label}", *(f"{size / GB:.1f}" for size in sizes)])
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(wide[0]), *(c.rjust(w) for c, w in zip(row[1:], wide[1:], strict=True))])
        for row in rows
    ]
    return "\n".join(["memory of a GPU in GB", *(f"  {line}" for line in lines)])
