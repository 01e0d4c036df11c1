"""Reads the files of a run directory for the page, once or again and again while the run works.

Any file may be missing, and the last line of ``metrics.jsonl`` may be incomplete: the run may be writing it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from miles_core.checkpoint.directory import STORAGE_OPTIONS
from miles_core.errors import CheckpointError, MilesError
from miles_core.observe import environment, metrics
from miles_core.observe.hints import Hints, hints_of
from miles_core.plugin.discovery import discover
from miles_core.plugin.plan import Plan
from miles_core.version import __version__
from miles_tools.samples.files import DIRECTORY, KINDS, rollout_files

#: ``run.ending.ENDING`` and ``mismatch.budget.BUDGET_FILE``, whose modules import torch.
ENDING, BUDGET_FILE = "ending.json", "budget.json"
METRICS, PLAN, CONFIG = "metrics.jsonl", "plan.json", "config.yaml"
#: Runs on one page: as many as there are colours.
MOST = 8
#: Files and folders whose changes are noticed.
_FOLLOWED = (METRICS, PLAN, CONFIG, environment.FILE, ENDING, BUDGET_FILE, *(f"{DIRECTORY}/{kind}" for kind in KINDS))
#: Options of where a run is stored and how it is shown, which change no step.
PLACES = frozenset({*(f"run.{name}" for name in STORAGE_OPTIONS), "replay.record_steps"})
#: Bytes before the position in ``metrics.jsonl`` that must still be the same to continue there.
_KNOWN = 64


class MetricsReader:
    """Reads ``metrics.jsonl``, and only what was appended to it since the last call. A file that was rewritten, as by a run that
    continues from an earlier step, is read from its beginning.

    Args:
        path: the file; it need not exist.

    Attributes:
        starts: how often it was read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts = 0
        self._restart()

    def _restart(self) -> None:
        self.starts += 1
        self._steps: dict[int, dict[str, Any]] = {}
        self._end, self._known = 0, b""

    def read(self) -> list[dict[str, Any]]:
        """Return the records in order of steps, as ``observe.metrics.read`` does.

        Raises:
            MilesError: a line is not a record.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self._end - len(self._known)))
                if file.read(len(self._known)) != self._known:
                    self._restart()
                    file.seek(0)
                data = file.read()
        except FileNotFoundError:
            self._restart()
            return []
        except OSError as error:
            raise MilesError(f"{self.path} cannot be read ({error.strerror}); check its permissions") from error
        data = data[: data.rfind(b"\n") + 1]
        try:
            for line in filter(bytes.strip, data.splitlines()):
                self._add(line)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, AttributeError):
            self._restart()
            return metrics.read(self.path)  # raises the error with the number of the line
        if data:
            self._end += len(data)
            self._known = (self._known + data)[-_KNOWN:]
        return [self._steps[step] for step in sorted(self._steps)]

    def _add(self, line: bytes) -> None:
        record = json.loads(line)
        record["step"] = int(record["step"])
        for name in record.keys() - {"nonfinite"}:
            float(0 if record[name] is None else record[name])
        self._steps.setdefault(record["step"], {}).update(record)


class RunReader:
    """One run directory. ``refresh`` reads what changed; the attributes hold the result.

    Args:
        directory: the run directory.
        label: its name on the page.

    Attributes:
        version: changes whenever a file of the run does.
        records: the metrics, one mapping per step.
        plan, config, environment, ending: contents of these files; {} for a file that does not exist.
        budgets: policy -> its mismatch budget; {} if none was measured.
        steps: kind of samples -> steps with samples on disk.
        hints: advice of all hints so far, in order of occurrence.

    Raises:
        MilesError: it is no run directory, or was written by a newer version.
    """

    def __init__(self, directory: Path, label: str = "") -> None:
        check_directory(directory)
        self.directory, self.label = directory, label or directory.resolve().name
        self.version = ""
        self.records: list[dict[str, Any]] = []
        self.plan: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.environment: dict[str, Any] = {}
        self.ending: dict[str, Any] = {}
        self.budgets: dict[str, Any] = {}
        self.steps: dict[str, list[int]] = {}
        self.hints: list[str] = []
        self._metrics = MetricsReader(directory / METRICS)
        self._hints: Hints | None = None
        self._reviewed: tuple[dict[str, Any], int] = {}, 0
        self._seen = 0

    def refresh(self) -> bool:
        """Read the files again if they changed; return whether they did.

        Raises:
            MilesError: a file is damaged. What was read before it stays.
        """
        version = self._sign()
        if version == self.version:
            return False
        self.version = version  # a damaged file is reported once, until it changes
        self.plan = read_json(self.directory / PLAN)
        self.config = read_yaml(self.directory / CONFIG)
        self.environment = read_json(self.directory / environment.FILE)
        self.ending = read_json(self.directory / ENDING)
        self.budgets = _read_budgets(self.directory / BUDGET_FILE)
        self.steps = {kind: list(rollout_files(self.directory, kind)) for kind in KINDS}
        self.records = self._metrics.read()
        self._review()
        return True

    def _sign(self) -> str:
        signature = []
        for name in _FOLLOWED:
            try:
                found = (self.directory / name).stat()
                signature.append((name, found.st_mtime_ns, found.st_size, found.st_ino))
            except OSError:
                signature.append((name, 0, 0, 0))
        return hashlib.sha256(repr(signature).encode()).hexdigest()[:16]

    def _review(self) -> None:
        """Evaluate the hints for the records that are new; for all if the plan or earlier records changed."""
        reviewed = self.plan, self._metrics.starts
        if self._hints is None or self._reviewed != reviewed:
            self._hints = Hints(hints_of(discover().values(), holds(self.directory / PLAN)))
            self._reviewed, self._seen, self.hints = reviewed, 0, []
        for record in self.records[self._seen :]:
            self.hints += map(str, self._hints.of(record, record["step"]))
        self._seen = len(self.records)


def open_runs(directories: Sequence[Path]) -> list[RunReader]:
    """Return readers of different runs; labels are the shortest ends of their paths that differ.

    Raises:
        MilesError: a directory is no run directory, is given twice, or was written by a newer version; or there are more runs than colours.
    """
    paths = [directory.resolve() for directory in directories]
    if twice := next((path for number, path in enumerate(paths) if path in paths[:number]), None):
        raise MilesError(f"{twice}: this run is given twice; give different runs")
    if len(paths) > MOST:
        raise MilesError(f"{len(paths)} runs: at most {MOST} fit on one page; leave some out")
    return [RunReader(path, label) for path, label in zip(paths, shorten_paths(paths), strict=True)]


def shorten_paths(paths: Sequence[Path]) -> list[str]:
    """Return the shortest end of each path, in whole folders, that differs between all of them."""
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        ends = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(ends)) == len(ends):
            return ends
    return [str(path) for path in paths]


def check_directory(directory: Path) -> None:
    """Raise MilesError unless ``directory`` is a run directory that this version can read."""
    if not directory.is_dir():
        raise MilesError(f"{directory}: no such directory; give a run directory, the one --save named")
    if not any((directory / name).is_file() for name in (METRICS, PLAN, CONFIG)):
        raise MilesError(
            f"{directory} is not a run directory: it has neither {METRICS}, {PLAN} nor {CONFIG}; give the one --save named"
        )
    core = read_json(directory / PLAN).get("core")
    with suppress(InvalidVersion):
        if core is not None and Version(str(core)) > Version(__version__):
            raise MilesError(
                f"{directory} was written by miles-core {core}, and this is {__version__}, which may misread it; install miles-core {core}"
            )


def holds(file: Path) -> Callable[[str], bool]:
    """Return a function that evaluates a condition for the run of this plan; without a readable plan, only the empty condition holds."""
    try:
        return Plan.from_json(file.read_text(encoding="utf-8")).holds
    except (OSError, CheckpointError):  # of a run by another version, or none
        return lambda condition: not condition


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a run; {} if there is no such file. MilesError if it is damaged."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise MilesError(f"{path} is not what a run wrote ({error}); restore or remove it") from error


def _read_budgets(path: Path) -> dict[str, Any]:
    """Read the mismatch budgets of a run: policy -> budget. Earlier versions wrote that of one policy, with its name."""
    found = read_json(path)
    return {str(found["policy"]): found} if "causes" in found else found


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping of a run; {} if there is no such file. MilesError if it is damaged."""
    if not path.is_file():
        return {}
    import yaml

    try:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise MilesError(f"{path} is not what a run wrote ({error}); restore or remove it") from error


def options_of(config: Mapping[str, Any], defaults: bool = True) -> dict[str, Any]:
    """Return ``table.option`` -> value, from the contents of ``config.yaml``. defaults: also options that the user did not set."""
    of_defaults = config.get("defaults")
    tables = [*of_defaults.items()] if defaults and isinstance(of_defaults, Mapping) else []
    tables += [(table, values) for table, values in config.items() if table != "defaults"]
    return {
        f"{table}.{name}": v for table, values in tables if isinstance(values, Mapping) for name, v in values.items()
    }
