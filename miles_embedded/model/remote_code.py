"""Python modules that a checkpoint brings for its own model or tokenizer, so that an export loads as the checkpoint did.

The ``auto_map`` of a JSON file names them: ``{"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}``, where ``ORGANISATION/NAME--modeling_own.X``
is code of another repository, which is fetched from there again. They are copied if this run has executed such code, which is what
``--trust-remote-code`` allows; otherwise the export's files do not name any.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from miles_core.errors import CheckpointError

#: Files of a checkpoint that may have an ``auto_map``.
_NAMING = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def is_remote(part: Any) -> bool:
    """Whether the class of a model or tokenizer came with a checkpoint."""
    return any(kind.__module__.startswith("transformers_modules.") for kind in type(part).__mro__)


def export_code(source: Path, directory: Path, trusted: bool) -> None:
    """Make the ``auto_map`` entries of an export right.

    Args:
        source: the checkpoint that the model was loaded from.
        directory: the export, whose JSON files have been written.
        trusted: code of the checkpoint was executed; its modules are copied. Otherwise entries that name modules are removed.

    Raises:
        CheckpointError: a module that is named is not in the checkpoint.
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
    """Names of the modules in the checkpoint itself. A tokenizer has a pair of classes, either may be null."""
    for entry in auto_map.values():
        for reference in entry if isinstance(entry, list | tuple) else [entry]:
            if isinstance(reference, str) and "--" not in reference:
                yield reference.rpartition(".")[0]


def _copy(source: Path, directory: Path, module: str) -> None:
    """Copy a module and what it imports from its own checkpoint."""
    file = source / f"{module.replace('.', '/')}.py"
    if not file.is_file():
        raise CheckpointError(
            f"auto_map names {file.name}, which {source} does not hold, so an export would not load; copy the checkpoint again"
        )
    for each in (file, *map(Path, get_relative_import_files(file))):
        target = directory / each.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(each, target)
