"""Where the time of a piece of work goes: phases on the host, kernels, CUDA calls of the host, and the GPU without work."""

from __future__ import annotations

import cProfile
import pstats
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_open: list[Phases] = []


class Phases:
    """Seconds of the functions marked with ``watch``, while this context is open.

    Args:
        waits: wait for the GPU at the end of each, so that its work is counted, too.
    """

    def __init__(self, waits: bool) -> None:
        self.waits = waits
        self.seconds: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Phases:
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)

    def milliseconds(self) -> dict[str, float]:
        """Milliseconds by phase."""
        return {name: round(1e3 * seconds, 2) for name, seconds in self.seconds.items()}


def watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Report the calls of ``function`` to open ``Phases``, and to a profiler as ``phase.NAME``."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        with torch.profiler.record_function(f"phase.{name}"):
            out = function(*args, **kwargs)
        for phases in _open:
            if phases.waits and torch.cuda.is_available():
                torch.cuda.synchronize()
            phases.seconds[name] += time.perf_counter() - started
        return out

    return watched


def milliseconds(function: Callable[[], object], times: int) -> float:
    """Mean milliseconds of a call, with its work on the GPU, after two calls that do not count."""
    cuda = torch.cuda.is_available()
    for number in range(times + 2):
        if number == 2:
            if cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
        function()
    if cuda:
        torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - started) / times, 2)


def synchronizations(function: Callable[[], object]) -> dict[str, int]:
    """Places at which the host waits for the GPU during a call, with their numbers."""
    if not torch.cuda.is_available():
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(f"{'/'.join(w.filename.split('/')[-3:])}:{w.lineno}" for w in caught)
    return dict(places.most_common(20))


def memory_calls(before: dict[str, int] | None = None) -> dict[str, int]:
    """Numbers of allocations from the driver, of memory given back to it, and of retries; since ``before``."""
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    names = ("num_device_alloc", "num_device_free", "num_alloc_retries", "num_ooms")
    return {name: int(stats.get(name, 0)) - (before or {}).get(name, 0) for name in names}


def into(found: dict[str, Any], name: str, function: Callable[[], Any]) -> Any:
    """Call ``function``, put its profile into ``found[name]``, and return what it returns."""
    out: list[Any] = []
    found[name] = profile(lambda: out.append(function()), 1)
    return out[0]


@contextmanager
def observed(found: dict[str, Any], name: str, number: int) -> Iterator[None]:
    """Time what this context does. Of ``number`` 0 there is a profile of the GPU, of 1 one of Python's functions."""
    before, profiler = memory_calls(), cProfile.Profile()
    started = time.perf_counter()
    if number == 0:
        with _profiler() as recorded:
            yield
            _wait()
        found[f"{name}_profile"] = tables(recorded, time.perf_counter() - started, 1)
        return
    if number == 1:
        profiler.enable()
    yield
    if number == 1:
        profiler.disable()
        found[f"{name}_functions"] = functions(profiler)
        return
    _wait()
    found.setdefault(f"{name}_seconds", []).append(round(time.perf_counter() - started, 4))
    found[f"{name}_memory_calls"] = memory_calls(before)


def functions(profiler: cProfile.Profile, count: int = 25) -> list[str]:
    """The functions that took most time: own and total milliseconds, calls, name."""
    stats: Any = pstats.Stats(profiler)
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:count]
    short = ["/".join(place.split("/")[-2:]) for (place, _, _), _ in rows]
    return [
        f"{1e3 * own:.1f} {1e3 * total:.1f} {calls} {place}:{line} {name}"
        for place, ((_, line, name), (_, calls, own, total, _)) in zip(short, rows, strict=True)
    ]


def profile(function: Callable[[], object], parts: int) -> dict[str, Any]:
    """Tables of one call; ``parts``: micro-batches of it."""
    started = time.perf_counter()
    with _profiler() as recorded:
        function()
        _wait()
    return tables(recorded, time.perf_counter() - started, parts)


def tables(recorded: torch.profiler.profile, wall: float, parts: int) -> dict[str, Any]:
    """Milliseconds of kernels by name, of operations and CUDA calls on the host, and of the GPU without work by phase.

    The profiler makes the host slower, so the last number is an upper bound."""
    events = list(recorded.events() or ())
    device = torch.autograd.DeviceType.CUDA
    kernels = sorted((e.time_range.start, e.time_range.end, e.name) for e in events if e.device_type == device)
    kernels = [k for k in kernels if not k[2].startswith("phase.")]
    host = [e for e in events if e.device_type != device]
    phases = sorted((e.time_range.start, e.time_range.end, e.name[6:]) for e in host if e.name.startswith("phase."))
    busy, until, idle = 0.0, None, defaultdict[str, float](float)
    for start, end, _ in kernels:
        if until is not None and start > until:
            phase = next((name for first, last, name in phases if first <= start <= last), "other")
            idle[phase] += start - until
        busy += max(0.0, end - max(start, until or start))
        until = max(until or end, end)
    operations = Counter(e.name for e in host if not e.name.startswith(("phase.", "cuda")))
    return {
        "wall_ms": round(1e3 * wall, 1),
        "busy_ms": round(busy / 1e3, 1),
        "idle_ms": {name: round(us / 1e3, 1) for name, us in idle.items()},
        "kernels_each_part": round(len(kernels) / parts, 1),
        "operations_each_part": round(sum(operations.values()) / parts, 1),
        "operations": dict(operations.most_common(25)),
        "cuda_calls": _by_name(
            [(e.time_range.start, e.time_range.end, e.name) for e in host if e.name[:4] == "cuda"], 12
        ),
        "kernels": _by_name(kernels, 40),
    }


def _by_name(spans: list[tuple[float, float, str]], count: int) -> list[str]:
    """Milliseconds, number and name of the names that took most time."""
    took, number = defaultdict[str, float](float), Counter[str]()
    for start, end, name in spans:
        short = name.replace("void ", "").replace("at::native::", "")[:110]
        took[short] += end - start
        number[short] += 1
    table = sorted(took.items(), key=lambda item: -item[1])[:count]
    return [f"{us / 1e3:.2f} {number[name]} {name}" for name, us in table]


def _profiler() -> Any:
    kinds = torch.profiler.ProfilerActivity
    cuda = torch.cuda.is_available()
    return torch.profiler.profile(activities=[kinds.CPU, *([kinds.CUDA] if cuda else [])])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
