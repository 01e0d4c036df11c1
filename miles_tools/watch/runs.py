"""What the server answers: the overview of all runs, a step's samples, one sample, one image."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from miles_core.errors import MilesError
from miles_tools.report.page import clean, gather, refresh
from miles_tools.report.reading import open_runs, options_of
from miles_tools.report.samples import SampleStore

#: The overview is made again after at least this many times the seconds that it took.
_PAUSE = 5


class WatchedRuns:
    """The runs of a server. Its methods may be called from several threads.

    Args:
        directories: the run directories.

    Raises:
        MilesError: as for ``open_runs``.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self.runs = open_runs(directories)
        self.stores = [SampleStore(run.directory) for run in self.runs]
        self._locks = [Lock() for _ in self.runs]
        self._lock = Lock()
        self._problems: dict[int, str] = {}
        self._data: dict[str, Any] = {}
        self._version, self._next = "", 0.0
        self._shown: list[bool] = []

    def overview(self, have: str = "") -> dict[str, Any] | None:
        """Return the overview, or None if it still has the version ``have``."""
        with self._lock:
            started = time.monotonic()
            if started >= self._next:
                changed = refresh(self.runs, self._problems)
                if changed or not self._data or self._states() != self._shown:
                    self._make()
                    self._next = time.monotonic() + _PAUSE * (time.monotonic() - started)
            return None if have == self._version else {**self._data, "version": self._version}

    def _make(self) -> None:
        try:
            self._data = gather(self.runs, self._problems)
        except MilesError as error:  # the file of a plot that is being written
            if not self._data:
                raise
            self._data["runs"][0]["problem"] = str(error)
        for run, store in zip(self.runs, self.stores, strict=True):
            store.reward_key = options_of(run.config).get("reward.reward_key")
        self._shown = self._states()
        self._version = f"{time.time_ns():x}"

    def _states(self) -> list[bool]:
        """Return which runs have been silent for more than a minute; their progress is described in other words then."""
        now = time.time()
        return [bool(run.records) and now - float(run.records[-1].get("time") or 0) > 60 for run in self.runs]

    def samples(self, query: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the entries of the samples of a step that contain the text ``text``."""
        run, kind, step = self._place(query)
        with self._locks[run]:
            return list(clean(self.stores[run].entries(kind, step, query.get("text", ""))))

    def sample(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return one sample."""
        run, kind, step = self._place(query)
        with self._locks[run]:
            return dict(clean(self.stores[run].sample(kind, step, _number(query, "row"))))

    def image(self, query: Mapping[str, str]) -> tuple[bytes, str]:
        """Return an image of a sample, and its MIME type."""
        run, kind, step = self._place(query)
        with self._locks[run]:
            return self.stores[run].image(kind, step, _number(query, "row"), _number(query, "number"))

    def _place(self, query: Mapping[str, str]) -> tuple[int, str, int]:
        run = _number(query, "run")
        if run >= len(self.runs):
            raise MilesError(f"run={run}: this server has {len(self.runs)} runs")
        return run, query.get("kind", "train"), _number(query, "step")


def _number(query: Mapping[str, str], name: str) -> int:
    text = query.get(name, "")
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise MilesError(f"{name}={text[:40]!r}: a number is needed")
    return int(text)
