"""Shared by the scripts that compare modes over seeds: work in several processes, runs that are kept, and intervals over seeds."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.formats.formats_in_the_loop import interval
from benchmarks.measure import commit, hardware

#: File in a directory of kept runs: where they were made.
WHERE = "where.json"


@contextmanager
def workplace(kept: str, versions: Callable[[], dict[str, str]]) -> Iterator[Path]:
    """A directory for runs: ``kept``, or a temporary one if that is empty.

    A kept directory has the result of every run that ended, in a file. A command that was stopped goes on with the others, and commands with
    fewer seeds or other modes may work in it one after another. It records where its runs were made: ``made_in``. Other commits may read its
    runs, and add none.
    """
    if not kept:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
        return
    directory = Path(kept).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / WHERE).exists():
        here = {"commit": commit(), "hardware": hardware(), "python": platform.python_version(), "versions": versions()}
        (directory / WHERE).write_text(json.dumps(here), encoding="utf-8")
    yield directory


def made_in(directory: Path) -> dict[str, Any]:
    """Commit, hardware and versions of the runs in a directory; nothing if it is a temporary one. A commit that was unknown is left out."""
    file = directory / WHERE
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {name: value for name, value in found.items() if value != "unknown"}


def work_in_processes(
    function: Callable[..., Any], keys: Sequence[Any], jobs: int, threads: int, kept: Path | None = None, **fixed: Any
) -> dict[Any, Any]:
    """Call ``function(*key, **fixed)`` for every key, in ``jobs`` processes with ``threads`` threads each; key -> result.

    ``kept``: a directory in which results are JSON files; those that it has already are read instead of made. Keys are strings, numbers and paths.
    """
    call = partial(_call, function, threads, fixed, kept)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return dict(zip(keys, pool.map(call, keys), strict=True))


def _call(
    function: Callable[..., Any], threads: int, fixed: dict[str, Any], kept: Path | None, key: tuple[Any, ...]
) -> Any:
    file = kept and kept / f"{name_of(function.__name__, key, fixed)}.json"
    if file and file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    if kept:
        refuse_another_commit(kept)
    import torch

    torch.set_num_threads(threads)
    result = function(*key, **fixed)
    if file:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(result, default=str), encoding="utf-8")
        part.replace(file)
    return result


def refuse_another_commit(directory: Path) -> None:
    """Stop before a run of this commit is added to those of another one."""
    there, own = made_in(directory).get("commit", "unknown"), commit()
    if there != own and "unknown" not in (there, own):
        raise SystemExit(
            f"a run is missing in {directory.name}, whose runs were made at commit {there}, and this is {own}: "
            "choose seeds and modes that are complete, or give another directory"
        )


def name_of(function: str, key: tuple[Any, ...], fixed: Mapping[str, Any]) -> str:
    """Name of a kept result: function, key, and the numbers that it was made with."""
    words = [function, *(part.name if isinstance(part, Path) else str(part) for part in key)]
    words += [f"{name}={value}" for name, value in fixed.items() if isinstance(value, int)]
    return "-".join(word.replace(",", "").replace(" ", "_") for word in words)


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
