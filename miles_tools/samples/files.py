"""Where saved samples are stored, and reading them.

``RUN/rollouts/train/00000012.jsonl.gz`` holds the samples that step 12 trained on, ``RUN/rollouts/eval/00000012.jsonl.gz`` the
evaluation samples after it: one JSON object per line, compressed with gzip. A file always holds all samples of its step.
"""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from miles_core.errors import MilesError

DIRECTORY = "rollouts"
#: Folder of the images of samples, in ``DIRECTORY``.
MEDIA = "media"
KINDS = ("train", "eval")
SUFFIX = ".jsonl.gz"

log = logging.getLogger(__name__)


#: Path of a step's samples in the run directory; ``FILE.format(kind, step)``.
FILE = f"{DIRECTORY}/{{}}/{{:08d}}{SUFFIX}"


def rollout_files(run_dir: Path | str, kind: str = "train") -> dict[int, Path]:
    """Return step -> file for all steps with samples on disk, in ascending order."""
    found = (Path(run_dir) / DIRECTORY / kind).glob(f"*{SUFFIX}")
    steps = {int(number): path for path in found if (number := path.name.removesuffix(SUFFIX)).isdigit()}
    return dict(sorted(steps.items()))


def part_files(part: Path, count: int) -> list[Path]:
    """Return the ``count`` files in which several processes write the parts of a file; the first is ``part``."""
    return [part, *(part.with_suffix(f".{number}.part") for number in range(1, count))]


def join_parts(files: Sequence[Path]) -> None:
    """Append the contents of the other ``part_files`` to the first, and delete them."""
    with files[0].open("ab") as out:
        for file in files[1:]:
            with file.open("rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
            file.unlink()


def read_rollouts(run_dir: Path | str, kind: str = "train", step: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the saved samples of a run as mappings, in order of steps.

    Args:
        run_dir: the run directory (``--save``).
        kind: ``train``, or ``eval`` for evaluation samples.
        step: read only this step; by default all steps on disk.

    Raises:
        MilesError: no such kind, or no samples of that step on disk.
    """
    if kind not in KINDS:
        raise MilesError(f"rollouts of kind {kind!r} do not exist; it is one of {', '.join(KINDS)}")
    files = rollout_files(run_dir, kind)
    if step is not None:
        if step not in files:
            have = f"those of steps {min(files)} to {max(files)} are" if files else "none are"
            raise MilesError(f"{run_dir}: the {kind} samples of step {step} are not on disk; {have}")
        files = {step: files[step]}
    for path in files.values():
        yield from read_file(path) or ()


def read_file(path: Path) -> list[dict[str, Any]] | None:
    """Return the samples of one file; None with a warning if the file is damaged, as after a power loss."""
    try:
        if not path.stat().st_size:
            raise EOFError("it is empty")
        with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
            return [dict(json.loads(line)) for line in file]
    except (OSError, EOFError, zlib.error, ValueError, TypeError, RecursionError) as error:
        log.warning("%s cannot be read (%s); the samples of that step are skipped", path, error)
        return None
