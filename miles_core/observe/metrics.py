"""The metric log: one JSON object per step, appended to ``metrics.jsonl``.

A record is ``{"step": 12, "time": 1767225600.0, "reward/mean": 0.41, ...}``. Step 0 holds the measurements before training. A
non-finite value is written as ``null`` and listed in the record's ``"nonfinite"`` entry, so that every line is standard JSON. A
process that dies while writing leaves an incomplete last line, which readers skip and the next writer removes.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from miles_core.errors import MilesError
from miles_core.redact import redact

log = logging.getLogger(__name__)

#: Keys of a record that are not metrics.
RESERVED = ("step", "time", "nonfinite")


class Sink(Protocol):
    """An additional destination of metrics (the part ``sink``)."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Appends records to ``path``; each line is passed to the operating system before ``append`` returns.

    Args:
        path: the file, created with its directory if missing. An incomplete last line is removed.
        resume_step: drop the records of later steps: a run that continues from step 40 writes step 41 again.
        sinks: additional destinations of the metrics.
    """

    def __init__(self, path: Path | str, resume_step: int | None = None, sinks: Iterable[Sink] = ()) -> None:
        self.path = Path(path)
        self.sinks = tuple(sinks)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        dropped = _repair(self.path, resume_step)
        if dropped:
            log.info("%s: dropped %d records after step %s, from where this run continues", path, dropped, resume_step)
        self._file = self._open()

    def roll_back(self, step: int) -> None:
        """Drop the records of steps after ``step``; sinks keep what they have."""
        self._file.close()
        _repair(self.path, step)
        self._file = self._open()

    def append(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Write one record and return its finite metrics; the others are logged as warnings by name.

        Raises MilesError when the file cannot be written (a full disk).
        """
        names = "\n".join(metrics)
        if redact(names) != names:  # once for all names: a step has a hundred of them
            metrics = {redact(name): value for name, value in metrics.items()}
        finite, bad = _split(metrics)
        record: dict[str, Any] = {"step": int(step), "time": round(time.time(), 3)}
        record |= {name: finite.get(name) for name in metrics}
        if bad:
            record["nonfinite"] = bad
            log.warning("step %d: not a finite number: %s", step, ", ".join(f"{k} = {v}" for k, v in bad.items()))
        try:
            line = json.dumps(record, allow_nan=False).encode() + b"\n"
            if self._file.write(line) != len(line):  # the next writer removes the incomplete line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise MilesError(
                f"cannot append step {step} to {self.path}: {error.strerror}; free space there and resume the run"
            ) from error
        for sink in self.sinks:
            sink.write(step, finite)
        return finite

    def _open(self) -> FileIO:
        """Open the file unbuffered, so that closing it cannot fail on pending writes."""
        return FileIO(self.path, "a")

    def close(self) -> None:
        """Close the file and the sinks."""
        self._file.close()
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> MetricLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path | str) -> list[dict[str, Any]]:
    """Return the records of ``path``, one per step in order of steps; [] if there is no file.

    Several records of one step (a warm start and an evaluation before step 1) are merged; later values take precedence.

    An incomplete last line is skipped. Any other line that is not a record raises MilesError with its number.
    """
    path = Path(path)
    if not path.exists():
        return []
    records, _ = _parse(path)
    merged: dict[int, dict[str, Any]] = {}
    for record in records:
        merged.setdefault(record["step"], {}).update(record)
    return [merged[step] for step in sorted(merged)]


def names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names of all metrics, in order of first occurrence."""
    return list(dict.fromkeys(name for record in records for name in record if name not in RESERVED))


def series(records: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric; non-finite values are NaN."""
    steps, values = [], []
    for record in records:
        if name in record:
            steps.append(record["step"])
            values.append(math.nan if record[name] is None else float(record[name]))
    return steps, values


def _split(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    finite: dict[str, float] = {}
    bad: dict[str, str] = {}
    for name, value in metrics.items():
        if name in RESERVED:
            raise ValueError(f"a metric cannot be named {name!r}")
        number = float(value)
        if math.isfinite(number):
            finite[name] = number
        else:
            bad[name] = str(number)
    return finite, bad


def _parse(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the records and their size in bytes, without an incomplete last line (one without a newline)."""
    records: list[dict[str, Any]] = []
    size = 0
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        size += len(line)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            record["step"] = int(record["step"])
            for name in record.keys() - {"nonfinite"}:
                float(0 if record[name] is None else record[name])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError) as error:
            raise MilesError(
                f"line {number} of {path} is not a metrics record ({line[:40].decode(errors='replace').strip()!r}); "
                "remove that line and try again"
            ) from error
        records.append(record)
    return records, size


def _repair(path: Path, resume_step: int | None) -> int:
    """Remove an incomplete last line and the records after ``resume_step``; return the number of dropped records."""
    if not path.exists():
        return 0
    records, size = _parse(path)
    kept = records if resume_step is None else [r for r in records if r["step"] <= resume_step]
    if len(kept) < len(records):
        text = "".join(json.dumps(r) + "\n" for r in kept)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    elif size < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(size)
    return len(records) - len(kept)
