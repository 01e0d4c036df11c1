"""The mismatch budget as a table, for the terminal, the page of ``miles verify`` and a run's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BUDGET_COLUMNS = ("cause", "mean |Δ log p|", "KL", "share", "")


def budget_rows(budget: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Convert ``Budget.to_dict()`` to rows: causes by size, the unmeasured remainder, the total, and the gap that affects training."""
    measured = sorted((c for c in budget["causes"] if not c["why"]), key=lambda c: -abs(c["share"]))
    rows: list[tuple[str, ...]] = [
        (
            c["name"],
            f"{c['abs_delta']:.3g}",
            f"{c['kl']:.3g}",
            f"{c['share']:z.1%}",
            "replayed: training is free of it" if c["corrected"] else "",
        )
        for c in measured
    ]
    rows += [(c["name"], "", "", "", f"not measured: {c['why']}") for c in budget["causes"] if c["why"]]
    total, remaining = budget["total"], budget["remaining"]
    rows.append(("all", f"{total['mean_abs']:.3g}", f"{total['kl_k3']:.3g}", "100.0%", f"{total['tokens']} tokens"))
    rows.append(("seen by training", f"{remaining['mean_abs']:.3g}", f"{remaining['kl_k3']:.3g}", "", ""))
    return rows
