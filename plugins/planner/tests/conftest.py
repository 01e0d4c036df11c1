"""Directories with the ``config.json`` of published models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[3] / "tests" / "published"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], str]:
    """Returns a function that makes a directory with the configuration of a published model."""

    def make(name: str) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        shutil.copy(PUBLISHED / f"{name}.json", folder / "config.json")
        return str(folder)

    return make
