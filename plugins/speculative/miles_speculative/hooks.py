"""Where speculative plugs in, whatever the backends: what the engine reports becomes metrics."""

from __future__ import annotations

from collections.abc import MutableMapping

from miles_core import hookimpl


class Speculative:
    """The metrics of drafting."""

    @hookimpl
    def on_step(self, metrics: dict[str, float]) -> None:
        summarise(metrics)


def summarise(metrics: MutableMapping[str, float]) -> None:
    """Rates from the counts a request came back with (``engine/NAME``, means over requests): the share of drafted tokens that was
    kept, tokens a step with drafts, and the share of drafts kept up to each depth."""
    for name in [name for name in metrics if name.endswith("engine/drafted")]:
        stem = name.removesuffix("engine/drafted")
        steps = metrics[f"{stem}engine/draft_steps"]
        if not steps:
            continue
        depths = [d for d in range(1, 100) if metrics.get(f"{stem}engine/tried_{d}")]
        kept = sum(metrics[f"{stem}engine/kept_{d}"] for d in depths)
        metrics[f"{stem}speculative/accept_rate"] = kept / metrics[name]
        metrics[f"{stem}speculative/accept_length"] = 1 + kept / steps
        for d in depths:
            metrics[f"{stem}speculative/accepted_to_{d}"] = (
                metrics[f"{stem}engine/kept_{d}"] / metrics[f"{stem}engine/tried_{d}"]
            )
