"""Runs a checkout whose packages are on PYTHONPATH and not installed: writes the metadata that plugins are found by.

A machine without git, network and an editable install has the files of a checkout and no entry points. ``register`` writes
``*.dist-info`` folders for core and its plugins, and for libraries that were copied without their metadata, and puts them on the path of
this process and its children. Start it with the checkout on PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT


def register(directory: Path, plugins: Sequence[str], libraries: Sequence[str] = ()) -> None:
    """Make core, these plugins (folders of ``plugins/``) and libraries known to this process and its children.

    Distributions with metadata stay as they are.

    Args:
        directory: an empty directory for the metadata, which must exist as long as the processes.
    """
    from miles_core.version import __version__

    folders = [ROOT, *(ROOT / "plugins" / name for name in plugins)]
    for folder in folders:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        if not _is_known(project["name"]):
            _write(directory, project["name"], __version__, project.get("entry-points", {}))
    for name in libraries:
        if not _is_known(name):
            _write(directory, name, str(importlib.import_module(name).__version__), {})
    paths = [str(path) for path in (directory, *folders)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def _is_known(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _write(directory: Path, name: str, version: str, groups: Mapping[str, Mapping[str, Any]]) -> None:
    folder = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [line for group, entries in groups.items() for line in (f"[{group}]", *_entries(entries), "")]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def _entries(entries: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {target}" for name, target in entries.items()]
