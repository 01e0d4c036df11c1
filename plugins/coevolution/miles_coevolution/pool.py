"""Past versions of the sides: states of trainers in the run's directory, listed in checkpoints.

A checkpoint has a copy of every version in the pool (hard links where the file system has them), so it can be continued from anywhere.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FOLDER = "coevolution"


class Pool:
    """The past versions of all sides.

    Args:
        directory: the run's directory.
        size: versions that are kept of each side; the oldest are dropped.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.size = directory / FOLDER, size
        self.versions: dict[str, list[int]] = {}

    def path(self, side: str, version: int) -> Path:
        """Directory of one version: the state of a trainer after ``version`` steps."""
        return self.directory / f"{side}-{version:08d}"

    def make_room(self, side: str, version: int) -> Path:
        """Return the path of a new version, after removing what an interrupted run may have left there."""
        path = self.path(side, version)
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def add(self, side: str, version: int) -> None:
        """Add a version that was written, and delete the oldest ones beyond ``size``."""
        kept = self.versions.setdefault(side, [])
        kept.append(version)
        while len(kept) > self.size:
            shutil.rmtree(self.path(side, kept.pop(0)), ignore_errors=True)

    def save(self, directory: Path) -> None:
        """Copy all versions into a checkpoint."""
        for side, versions in self.versions.items():
            for version in versions:
                _copy(self.path(side, version), directory / FOLDER / "past" / self.path(side, version).name)

    def load(self, directory: Path, versions: dict[str, list[int]]) -> None:
        """Take the versions of a checkpoint."""
        self.versions = {side: list(numbers) for side, numbers in versions.items()}
        for side, numbers in self.versions.items():
            for version in numbers:
                path = self.make_room(side, version)
                _copy(directory / FOLDER / "past" / path.name, path)


def _copy(source: Path, target: Path) -> None:
    """Copy a directory, with hard links where possible: the files of a version never change."""

    def link(one: str, other: str) -> str:
        try:
            os.link(one, other)
        except OSError:  # another file system, or one without links
            shutil.copy2(one, other)
        return other

    shutil.copytree(source, target, copy_function=link)
