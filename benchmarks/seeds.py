"""Shared by the scripts that compare modes over seeds: work in several processes, and intervals over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from formats_in_the_loop import interval


def work_in_processes(
    function: Callable[..., Any], keys: Sequence[Any], jobs: int, threads: int, **fixed: Any
) -> dict[Any, Any]:
    """Call ``function(*key, **fixed)`` for every key, in ``jobs`` processes with ``threads`` threads each; key -> result."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return dict(zip(keys, pool.map(partial(_call, function, threads, fixed), keys), strict=True))


def _call(function: Callable[..., Any], threads: int, fixed: dict[str, Any], key: tuple[Any, ...]) -> Any:
    import torch

    torch.set_num_threads(threads)
    return function(*key, **fixed)


def mean_of(values: Sequence[float]) -> list[float | None]:
    """Mean, and half-width of its 95 % interval (Student's t); None with one value."""
    if len(values) == 1:
        return [round(values[0], 4), None]
    mean, half = interval(values)
    return [round(mean, 4), round(half, 4)]


def change_of(pairs: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Values (before, after) of every seed: their means with intervals, the change paired by seed, and the change of each seed."""
    before, after = ([pair[at] for pair in pairs] for at in (0, 1))
    gains = [b - a for a, b in zip(before, after, strict=True)]
    return {
        "before": mean_of(before),
        "after": mean_of(after),
        "gain": mean_of(gains),
        "gain_of_each_seed": [round(gain, 4) for gain in gains],
    }
