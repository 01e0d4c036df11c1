"""Reads from SGLang's source which architectures (``architectures`` of a ``config.json``) it has models of, without importing it.

    python -m miles_sglang.architectures [SRT/MODELS [VERSION]]

writes ``architectures.json`` next to this module, by default from the installed SGLang.
"""

from __future__ import annotations

import ast
import json
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

TABLE = Path(__file__).with_name("architectures.json")
#: Name of the module variable with the classes that SGLang registers.
_ENTRY = "EntryClass"


@cache
def load_table() -> tuple[str, frozenset[str]]:
    """Return the SGLang version of the table, and the architectures in it."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return table["sglang"], frozenset(table["architectures"])


def read(models: Path) -> list[str]:
    """Return the names of the classes that the modules in SGLang's folder ``srt/models`` register, sorted."""
    return sorted({name for path in models.glob("*.py") for name in registered(ast.parse(path.read_bytes()))})


def registered(module: ast.Module) -> set[str]:
    """Return the names of the classes that a module registers."""
    found: set[str] = set()
    for node in ast.walk(module):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == _ENTRY for target in targets):
            assert isinstance(node, ast.Assign)
            found |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    return found


def installed_models() -> Path | None:
    """Return the folder ``srt/models`` of the installed SGLang; None if SGLang is not installed."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "srt" / "models"


def main(arguments: list[str]) -> None:
    """Write ``architectures.json``."""
    models = Path(arguments[0]) if arguments else installed_models()
    if models is None:
        sys.exit("SGLang is not installed: give the path of its srt/models")
    version = arguments[1] if len(arguments) > 1 else metadata.version("sglang")
    lines = ",\n".join(json.dumps(name) for name in read(models))
    TABLE.write_text(f'{{"sglang": "{version}", "architectures": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
