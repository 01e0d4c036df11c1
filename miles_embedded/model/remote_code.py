"""Export the Python code that a checkpoint contains for its model or tokenizer, so that the export can be loaded like the checkpoint.

The ``auto_map`` of a JSON file names the code: ``{"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}``. An entry
``ORGANISATION/NAME--modeling_own.X`` refers to another repository and is not copied. Modules are copied only if this run executed such
code, which requires ``--trust-remote-code``; otherwise the entries are removed from the export.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from miles_core.errors import CheckpointError

#: Checkpoint files that may contain an ``auto_map``.
_NAMING = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def is_remote(part: Any) -> bool:
    """Whether the class of a model or tokenizer was loaded from a checkpoint's code."""
    return any(kind.__module__.startswith("transformers_modules.") for kind in type(part).__mro__)


def export_code(source: Path, directory: Path, trusted: bool) -> None:
    """Write the ``auto_map`` entries of an export, and copy the modules they name.

    Args:
        source: the checkpoint that the model was loaded from.
        directory: the export, with its JSON files already written.
        trusted: whether code of the checkpoint was executed. If so, its modules are copied; otherwise the entries are removed.

    Raises:
        CheckpointError: the checkpoint lacks a named module.
    """
    for name in _NAMING:
        stored = _read(directory / name)
        given = stored.get("auto_map") or _read(source / name).get("auto_map")
        if not given:
            continue
        if trusted:
            for module in _modules(given):
                _copy(source, directory, module)
            stored["auto_map"] = given
        elif not stored.pop("auto_map", None):
            continue
        if (directory / name).is_file():
            (directory / name).write_text(json.dumps(stored, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _modules(auto_map: dict[str, Any]) -> Iterator[str]:
    """Yield the names of modules in the checkpoint itself. A tokenizer has a pair of classes, either of which may be null."""
    for entry in auto_map.values():
        for reference in entry if isinstance(entry, list | tuple) else [entry]:
            if isinstance(reference, str) and "--" not in reference:
                yield reference.rpartition(".")[0]


def _copy(source: Path, directory: Path, module: str) -> None:
    """Copy a module and its relative imports."""
    file = source / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        raise CheckpointError(
            f"auto_map names {file.name}, which is missing in {source}, so an export could not be loaded; copy the checkpoint again"
        )
    for each in (file, *map(Path, get_relative_import_files(file))):
        target = directory / each.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(each, target)
