"""Format a plan for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from miles_core.plugin.facts import show
from miles_core.plugin.plan import Plan


def chains(implemented: Mapping[str, Sequence[str]]) -> list[str]:
    """Format the chain of every ``wrap_*`` hook from the inside out: ``wrap_forward: core <- second <- first (outermost)``.

    Args:
        implemented: hook -> plugins that implement it, in plan order (outermost first).
    """
    lines = []
    for hook, plugins in implemented.items():
        if hook.startswith("wrap_") and plugins:
            lines.append(f"{hook}: {' <- '.join(['core', *reversed(plugins)])} (outermost)")
    return lines


def describe(plan: Plan, implemented: Mapping[str, Sequence[str]]) -> str:
    """Format a plan as ``miles plan`` prints it."""
    blocks = [plan.header]
    if plan.plugins:
        wide = max(len(p.name) for p in plan.plugins)
        rows = [
            f"  {p.name.ljust(wide)}  {p.version}  {p.source or 'no distribution'}: {p.because}" for p in plan.plugins
        ]
        blocks.append("plugins, outermost first\n" + "\n".join(rows))
    shown = [f for f in plan.facts if (f.name in plan.consulted or f.chosen) and not f.name.startswith("plugin")]
    if shown:
        blocks.append("facts\n" + "\n".join(f"  {f}" for f in shown))
    if plan.sets:
        blocks.append("set by plugins\n" + "\n".join(f"  {s.path} = {show(s.value)} ({s.plugin})" for s in plan.sets))
    events = [f"{h}: {', '.join(p)}" for h, p in implemented.items() if p and not h.startswith("wrap_")]
    hooks = chains(implemented) + events
    if hooks:
        blocks.append("hooks\n" + "\n".join(f"  {line}" for line in hooks))
    blocks += plan.reviews
    notes = list_notices(plan)
    if notes:
        blocks.append("\n".join(notes))
    return "\n\n".join(blocks)


def list_notices(plan: Plan) -> list[str]:
    """Return the notes of an accepted plan: advice, emulation, and rules deferred to workers."""
    later = [d for d in plan.deferred if not d.holds_here]
    return [
        *(f"note: {line}" for line in plan.advice),
        *(f"emulated: {line}" for line in plan.waived),
        *(f"later: {d.who} needs {d.needs}, not known on this host; every worker will check it" for d in later),
    ]
