"""What a hook call costs: pluggy against plain composition, and what torch.compile does with either.

Run: ``python benchmarks/project/hook_call_cost.py`` (about half a minute; ``--quick`` for a smoke test). The last line of
the output is one JSON object: microseconds per call, milliseconds for a stream of tensors, and whether a forward with a
hook inside compiles as one graph.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import reduce

import pluggy
import torch

SPEC, IMPL = pluggy.HookspecMarker("cost"), pluggy.HookimplMarker("cost")


class Specs:
    @SPEC
    def event(self, run, policy, value): ...


class Told:
    @IMPL
    def event(self, run, policy, value):
        return value


class Around:
    @IMPL(wrapper=True)
    def event(self, run, policy, value):
        return (yield)


def manager(told: int = 0, around: int = 0) -> pluggy.PluginManager:
    """A manager with so many plain implementations and wrappers."""
    made = pluggy.PluginManager("cost")
    made.add_hookspecs(Specs)
    for part in [*(Told() for _ in range(told)), *(Around() for _ in range(around))]:
        made.register(part)
    return made


def best(function: Callable[[], object], count: int, repeats: int) -> float:
    """Seconds per call, the best of ``repeats`` rounds."""
    found = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(count):
            function()
        found.append((time.perf_counter() - started) / count)
    return min(found)


def calls(count: int, repeats: int) -> dict[str, float]:
    """Microseconds per call, three arguments."""

    def plain(run, policy, value):
        return value

    timed: dict[str, Callable[[], object]] = {"plain function": lambda: plain(1, 2, 3)}
    wrapped = reduce(lambda inner, _: lambda r, p, v: inner(r, p, v), range(3), plain)
    timed["composed, 3 wrappers"] = lambda: wrapped(1, 2, 3)
    for told, around in ((0, 0), (1, 0), (3, 0), (8, 0), (1, 1), (3, 3)):
        hook = manager(told, around).hook
        timed[f"pluggy, {told} plain, {around} wrappers"] = lambda hook=hook: hook.event(run=1, policy=2, value=3)
    return {name: round(best(function, count, repeats) * 1e6, 3) for name, function in timed.items()}


def stream(tensors: int, repeats: int) -> dict[str, float]:
    """Milliseconds to pass one item per tensor of a weight sync through two plugins."""
    hook = manager(told=2).hook
    items = list(range(tensors))

    def through(inner: Callable[[], Iterator[int]]) -> Callable[[], Iterator[int]]:
        return lambda: (item for item in inner())

    composed = through(through(lambda: iter(items)))

    def by_pluggy() -> None:
        for item in items:
            hook.event(run=1, policy=2, value=item)

    def by_composition() -> None:
        for _ in composed():
            pass

    return {
        "tensors": tensors,
        "pluggy": round(best(by_pluggy, 1, repeats) * 1e3, 2),
        "composed": round(best(by_composition, 1, repeats) * 1e3, 2),
    }


def compiles() -> dict[str, str]:
    """Whether ``torch.compile(fullgraph=True)`` takes a forward that calls the hook on a tensor (Dynamo only)."""
    found = {}
    for name, hook in {
        "composed": None,
        "pluggy, plain implementation": manager(1, 0).hook,
        "pluggy, one wrapper": manager(1, 1).hook,
    }.items():

        def forward(x, hook=hook):
            if hook is not None:
                (x,) = hook.event(run=1, policy=2, value=x)
            return x * 2

        torch._dynamo.reset()
        try:
            torch.compile(forward, fullgraph=True, backend="eager")(torch.ones(2))
            found[name] = "one graph"
        except Exception as error:  # the kind differs between torch versions; its name is the result
            found[name] = f"refused: {type(error).__name__}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    count, repeats = (2_000, 2) if quick else (50_000, 7)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "benchmark": "hook_call_cost",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": git.stdout.strip() or "unknown",
        "command": "python benchmarks/project/hook_call_cost.py" + (" --quick" if quick else ""),
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores, one thread used",
        "python": platform.python_version(),
        "pluggy": pluggy.__version__,
        "torch": torch.__version__,
        "microseconds_per_call": calls(count, repeats),
        "milliseconds_per_sync": stream(2_000 if quick else 18_867, repeats),
        "compile": compiles(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
