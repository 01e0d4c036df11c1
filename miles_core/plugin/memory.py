"""Check whether a run fits into the memory of its GPUs.

Backends compute the memory of each of their processes on one GPU (``Plugin.memory``). This module assigns the processes to GPUs, formats
a table, and compares the totals with the GPU's memory. In one process (``--runtime inline``), the memory of engine and trainer adds up.
With ``--colocate`` they take turns: one works while the other sleeps, and during a weight sync both hold their weights. Otherwise
engine and trainer use separate GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from miles_core.plugin.facts import Facts
from miles_core.plugin.problem import Problem, describe_fact

GB = 1e9
#: Fraction of a GPU's memory that PyTorch's allocator can use; fragmentation makes the rest unusable.
USABLE = 0.95
#: Maximum number of option changes to try for each process of a rejected plan.
_TRIED = 6

Changes = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Parts:
    """Device memory of one process on one GPU, in bytes.

    Attributes:
        weights: the model's weights.
        draft: the weights of a draft model.
        gradients: the trainer's gradients.
        optimizer: the trainer's optimiser state, including FP32 master weights.
        activations: peak activations.
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
        """The sum of all parts."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Usage:
    """Memory of one process of a backend on one GPU.

    Attributes:
        kind: ``engine`` or ``trainer``.
        label: name of the process, e.g. ``"rank of stage 0"``.
        parts: memory while the process works.
        asleep: bytes that it keeps while it sleeps.
        usable: fraction of the GPU's memory that it can use.
        note: how the numbers were computed, one line.
        processes: number of processes that work together, one per GPU; several processes never run in the driver's process.
        replaces: whether it takes the place of other plugins' usages of its kind and label, as for a plugin that changes how a backend
            stores a model.
        fitting: (bytes available next to other processes, bytes available alone) -> changes of facts under which the process fits,
            smallest first. They may include other hardware (``gpu.count``, ``gpu.machines``).
    """

    kind: str
    label: str
    parts: Parts
    asleep: float = 0.0
    usable: float = USABLE
    note: str = ""
    processes: int = 1
    replaces: bool = False
    fitting: Callable[[float, float], Changes] = lambda budget, alone: ()

    def during_sync(self) -> Usage:
        """Return the memory during a weight sync: the weights, and the bytes that remain while asleep."""
        return replace(self, parts=Parts(weights=self.parts.weights, draft=self.parts.draft, other=self.asleep))


@dataclass(frozen=True)
class _Peak:
    """Peak memory of one GPU: a working process, and the bytes (``extra``) of another process on the same GPU, named by ``why``."""

    usage: Usage
    extra: float
    why: str

    @property
    def total(self) -> float:
        return self.usage.parts.total + self.extra

    def room(self, gpu: float) -> float:
        """Bytes available to the working process."""
        return self.usage.usable * gpu - self.extra


def review_memory(usages: Sequence[Usage], facts: Facts) -> tuple[list[str], list[Problem]]:
    """Return the memory table of the plan, and a problem for each process that does not fit.

    Args:
        usages: usages of all processes of one policy.
        facts: facts of the plan. Without a known ``gpu.memory_gb``, nothing is compared.
    """
    replaced = {(u.kind, u.label) for u in usages if u.replaces}
    usages = [u for u in usages if u.replaces or (u.kind, u.label) not in replaced]
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
    apart = "they share one GPU" if inline else "on separate GPUs"
    where = "they take turns on the same GPUs" if colocated else apart
    notes = [
        _table(usages),
        *(f"  {usage.note}" for usage in usages if usage.note),
        end + f"; {where}" * (len({usage.kind for usage in usages}) > 1),
    ]
    over = [peak for peak in peaks if gpu and peak.room(gpu) < peak.usage.parts.total]
    over.sort(key=lambda peak: peak.total, reverse=True)
    first = {peak.usage.kind: peak for peak in reversed(over)}
    refused = sorted(first.values(), key=lambda peak: -peak.total) if colocated or not inline else over[:1]
    return ["\n".join(dict.fromkeys(notes))], [_problem(peak, usages, gpu, facts) for peak in refused]


def _peaks(usages: Sequence[Usage], colocated: bool, inline: bool) -> Iterable[_Peak]:
    for usage in usages:
        # one process holds the trainers of a policy and of its critic, too
        others = [o for o in usages if o.kind != usage.kind or (inline and not colocated and o is not usage)]
        if colocated and others:
            yield _Peak(usage, max(o.asleep for o in others), f"the sleeping {others[0].kind}")
            if usage.kind != "trainer":
                continue  # one row for both sides
            pushed = max((o.during_sync() for o in others), key=lambda o: o.parts.total)
            yield _Peak(usage.during_sync(), pushed.parts.total, f"the {pushed.kind} during a weight sync")
        elif inline and others:
            yield _Peak(usage, sum(o.parts.total for o in others), " and ".join(f"the {o.kind}" for o in others))
        else:
            yield _Peak(usage, 0.0, "")


def _problem(peak: _Peak, usages: Sequence[Usage], gpu: float, facts: Facts) -> Problem:
    usage = peak.usage
    extra = f", and {peak.extra / GB:.1f} for {peak.why}" if peak.extra else ""
    values = [
        describe_fact(facts.lookup("gpu.memory_gb")),
        (f"{usage.kind}, {usage.label}", f"{usage.parts.total / GB:.1f} GB", _format_parts(usage.parts) + extra),
    ]
    others = {other.kind: other for other in usages if other.kind != usage.kind and peak.extra}
    values += [
        (f"{o.kind}, {o.label}", f"{o.parts.total / GB:.1f} GB", _format_parts(o.parts)) for o in others.values()
    ]
    because = f"{usage.usable:.0%} of a GPU can be filled" if usage.usable < 1 else "a GPU holds no more"

    def tries() -> Iterator[Mapping[str, Any]]:
        for one in (usage, *others.values()):
            other = peak.extra if one is usage else usage.parts.total
            yield from islice(one.fitting(max(one.usable * gpu - other, 0.0), one.usable * gpu), _TRIED)

    who = " and ".join(f"the {one.kind} {facts.value(one.kind)}" for one in (usage, *others.values()))
    verb = "need" if others else "needs"
    return Problem(
        who, f"{peak.total / GB / usage.usable:.0f} GB on each GPU", because, tuple(values), verb, tries=tries
    )


def _format_parts(parts: Parts) -> str:
    held = [(getattr(parts, field.name) / GB, field.name) for field in fields(Parts)]
    return " + ".join(f"{size:.1f} {name}" for size, name in held if size >= 0.05)


def _table(usages: Sequence[Usage]) -> str:
    """Format one row per process; omits columns without values."""
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
