"""Metrics of running servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles_core.contracts.run import StateKey
from miles_core.plugin.marker import hookimpl

_NEWS = StateKey[dict[str, list["PoolNews"]]]()


@dataclass
class PoolNews:
    """What happened to running servers: numbers of servers that serve, joined and left, and of requests that were sent again."""

    serving: int = 0
    joined: int = 0
    left: int = 0
    retried: int = 0


def report_news(run: Any, engine: str, news: PoolNews | None) -> None:
    """Report what happens to the servers of an engine of this process; None if the run started the engine."""
    if news is not None:
        run.state.setdefault(_NEWS, {}).setdefault(engine, []).append(news)


class PoolMetrics:
    """Reports the servers at the end of a step, and what happened to them during it. Engines in other processes write it to their logs only.

    Attributes:
        engine: name of the engine, and prefix of the metrics.
    """

    engine: str

    @hookimpl
    def on_step(self, run: Any, metrics: dict[str, float]) -> None:
        listed = run.state.get(_NEWS, {}).get(self.engine, ())
        news: dict[int, PoolNews] = {id(each): each for each in listed}  # policies may share servers
        if not news:
            return
        found = {"servers": 0, "joined": 0, "left": 0, "retried_requests": 0}
        for each in news.values():
            found["servers"] += each.serving
            found["joined"] += each.joined
            found["left"] += each.left
            found["retried_requests"] += each.retried
            each.joined = each.left = each.retried = 0
        metrics |= {f"{self.engine}/{name}": float(value) for name, value in found.items()}
