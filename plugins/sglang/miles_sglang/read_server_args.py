"""Reads the names, types, choices and defaults of SGLang's server options from its source, without importing it.

    python -m miles_sglang.read_server_args [SERVER_ARGS.PY [VERSION]]

writes ``server_args.json`` next to this module, by default from the installed SGLang. The plugin reads that file, so that it can define
and check the flags without importing SGLang or torch.
"""

from __future__ import annotations

import ast
import json
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("server_args.json")
_SIMPLE = {"bool", "int", "float", "str"}


def read(source: str) -> list[dict[str, Any]]:
    """Return the fields of ``ServerArgs`` in the source text of ``server_args.py``, in order.

    Returns:
        one dictionary per field: ``name``; ``type``, one of bool, int, float, str, ``list[...]`` of these, or ``json`` for
        anything else; ``choices`` and ``default`` if they are literals; ``cli`` if SGLang's flag has another name than the field.
    """
    module = ast.parse(source)
    constants = _constants(module)
    server_args = next(n for n in module.body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs")
    found = []
    for node in server_args.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.append(_field(node.target.id, node, constants))
    return found


def installed_source() -> str | None:
    """Return the source text of the installed SGLang's ``server_args.py``; None if SGLang is not installed."""
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return (Path(next(iter(spec.submodule_search_locations))) / "srt" / "server_args.py").read_text(encoding="utf-8")


def _field(name: str, node: ast.AnnAssign, constants: dict[str, Any]) -> dict[str, Any]:
    annotation = node.annotation
    rest: list[ast.expr] = []
    if isinstance(annotation, ast.Subscript) and _name(annotation.value) == "A":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation, *rest = annotation.slice.elts
    kind, choices = _type(annotation)
    spelling = flag = f"--{name.replace('_', '-')}"
    for extra in rest:
        if isinstance(extra, ast.Call) and _name(extra.func) == "Arg":
            given = {k.arg: _plain(k.value, constants) for k in extra.keywords}
            choices, spelling = given.get("choices") or choices, given.get("cli_name") or flag
    entry: dict[str, Any] = {"name": name, "type": kind}
    if spelling != flag:
        entry["cli"] = spelling.removeprefix("--")
    if choices and kind != "json":
        entry["choices"] = sorted(choices) if isinstance(choices, set) else [c for c in choices if c is not None]
    default = _plain(node.value, constants)
    if default not in (None, "", [], {}):
        entry["default"] = default
    return entry


def _type(node: ast.expr) -> tuple[str, list[Any]]:
    """Return (type, choices) of an annotation, without ``Optional``."""
    if isinstance(node, ast.Name) and node.id in _SIMPLE:
        return node.id, []
    if isinstance(node, ast.Subscript):
        outer = _name(node.value)
        if outer == "Optional":
            return _type(node.slice)
        if outer in ("List", "list") and _name(node.slice) in _SIMPLE:
            return f"list[{_name(node.slice)}]", []
        if outer == "Literal":
            values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            choices = [v.value for v in values if isinstance(v, ast.Constant)]
            return ("int" if all(isinstance(c, int) for c in choices) else "str"), choices
    return "json", []


def _constants(module: ast.Module) -> dict[str, Any]:
    """Return the module-level literals by name."""
    found = {}
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _plain(node.value, {})
            if value is not None:
                found[node.targets[0].id] = value
    return found


def _plain(node: ast.expr | None, constants: dict[str, Any]) -> Any:
    """Return the value of a literal or of a named constant; None for any other expression."""
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def main(arguments: list[str]) -> None:
    """Write ``server_args.json``."""
    source = Path(arguments[0]).read_text(encoding="utf-8") if arguments else installed_source()
    if source is None:
        sys.exit("SGLang is not installed: give the path of its srt/server_args.py")
    version = arguments[1] if len(arguments) > 1 else metadata.version("sglang")
    lines = ",\n".join(json.dumps(field) for field in read(source))
    TABLE.write_text(f'{{"sglang": "{version}", "fields": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
