"""Metrics of running servers."""

from __future__ import annotations

from typing import Any

from miles_core.plugin import StateKey, hookimpl
from miles_sglang.link import Link, PoolNews

_NEWS = StateKey[list[PoolNews]]()


def report_news(run: Any, link: Link) -> None:
    """Report what happens to the servers of an engine of this process, if they run elsewhere."""
    if link.news is not None:
        run.state.setdefault(_NEWS, []).append(link.news)


class PoolMetrics:
    """Reports the servers at the end of a step, and what happened to them during it. Engines in other processes write it to their logs only."""

    @hookimpl
    def on_step(self, run: Any, metrics: dict[str, float]) -> None:
        news: dict[int, PoolNews] = {id(each): each for each in run.state.get(_NEWS, ())}  # policies may share servers
        if not news:
            return
        found = {"servers": 0, "joined": 0, "left": 0, "retried_requests": 0}
        for each in news.values():
            found["servers"] += each.serving
            found["joined"] += each.joined
            found["left"] += each.left
            found["retried_requests"] += each.retried
            each.joined = each.left = each.retried = 0
        metrics |= {f"sglang/{name}": float(value) for name, value in found.items()}
