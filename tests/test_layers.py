"""Layers: which package may import which. This table is the architecture; ``docs/structure.md`` is drawn from it."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: A package -> the packages it may import, in rows: each imports from rows above its own only, so there is no cycle. Modules
#: directly in ``miles_core`` count as packages. Imports for type checking and inside functions count like any other.
LAYERS: list[dict[str, str]] = [
    {"errors": "", "nearest": "", "stash": "", "version": ""},
    {"data": "errors"},
    {"plugin": "errors nearest version data"},
    {
        "config": "errors nearest plugin",
        "observe": "errors version",
        "checkpoint": "errors version",
    },
    {
        "algorithm": "errors",
        "reward": "errors data",
        "precision": "errors nearest data plugin config checkpoint",
    },
    {"contracts": "errors stash data plugin config observe checkpoint algorithm precision"},
    {
        "rollout": "errors data config observe reward contracts",
        "train": "errors data plugin config checkpoint algorithm contracts",
        "sync": "data precision contracts",
    },
    {"mismatch": "errors stash version data plugin observe precision contracts rollout sync"},
    {
        "run": "errors version data plugin config observe checkpoint reward precision contracts rollout train sync mismatch",
    },
    {"loop": "contracts rollout sync mismatch run"},
    {
        "launch": "plugin config observe checkpoint contracts run loop",
        "convert": "errors data checkpoint precision",
        "demo": "errors observe",
    },
    {
        "cli": "errors nearest version plugin config observe checkpoint precision contracts mismatch run launch convert demo",
        "testing": "errors data plugin config observe precision contracts mismatch run launch demo",
    },
]

#: The public modules: they define nothing, they name what plugins may use. Nothing in ``miles_core`` imports them.
PUBLIC = ("miles_core",)

#: Rooms of the backend, likewise; each may import any package of ``miles_core`` that is above ``cli``.
ROOMS: list[dict[str, str]] = []

#: Files that import each other, and why two files are one idea.
CIRCLES: dict[tuple[str, str], str] = {
    ("precision.format", "precision.product"): "a format offers its product, a product multiplies a format's codes",
}


@dataclass(frozen=True)
class Import:
    """One file's import of a module of this repository."""

    file: Path
    line: int
    importer: str
    imported: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.imported}"


@cache
def modules(package: str) -> dict[str, Path]:
    """Dotted name -> file, packages by the name of their ``__init__``."""
    found = {}
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(package: str) -> tuple[Import, ...]:
    """Every import in ``package`` of a module of ``miles_core``, ``miles_embedded`` or a plugin."""
    known = modules("miles_core") | modules("miles_embedded")
    found = []
    for importer, file in modules(package).items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
                within = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in known else str(node.module) for name in within]
            else:
                continue
            found += [Import(file, node.lineno, importer, name) for name in names if name.startswith("miles_")]
    return tuple(found)


def package_of(module: str) -> str:
    """``miles_core.plugin.rule`` -> ``plugin``; the root of a distribution is itself."""
    root, _, rest = module.partition(".")
    return rest.partition(".")[0] or root


def inside(root: str, table: list[dict[str, str]]) -> dict[str, dict[str, list[Import]]]:
    """importing package -> imported package -> its imports, within one distribution."""
    found: dict[str, dict[str, list[Import]]] = defaultdict(lambda: defaultdict(list))
    for each in imports(root):
        if each.imported.partition(".")[0] == root:
            importer, imported = package_of(each.importer), package_of(each.imported)
            if importer != imported:
                found[importer][imported].append(each)
    return found


@pytest.mark.parametrize(
    ("root", "table"), [("miles_core", LAYERS), ("miles_embedded", ROOMS)], ids=lambda x: str(x)[:14]
)
def test_the_table_goes_down_only(root, table):
    above: set[str] = set()
    for row in table:
        for package, allowed in row.items():
            assert set(allowed.split()) <= above, f"{package} imports from its own row or one below"
        above |= row.keys()


def test_every_package_has_a_row():
    packages = {package_of(m) for m in modules("miles_core")} - set(PUBLIC)
    assert packages == {package for row in LAYERS for package in row}


@pytest.mark.parametrize(
    ("package", "allowed"), [pair for row in LAYERS for pair in row.items()], ids=[p for row in LAYERS for p in row]
)
def test_a_package_imports_what_the_table_says(package, allowed):
    found = inside("miles_core", LAYERS)[package]
    against = [str(each) for other, all_of in found.items() if other not in allowed.split() for each in all_of]
    assert not against, f"{package} may import {allowed or 'nothing'}:\n" + "\n".join(against)
    unused = sorted(set(allowed.split()) - found.keys())
    assert not unused, f"{package} does not import {', '.join(unused)} any more: take it out of the table"


def test_core_imports_no_backend_and_no_plugin():
    against = [str(each) for each in imports("miles_core") if each.imported.partition(".")[0] != "miles_core"]
    assert not against, "\n".join(against)


def circles(package: str) -> set[tuple[str, ...]]:
    """Groups of files that import each other, directly or through others."""
    edges: dict[str, set[str]] = defaultdict(set)
    for each in imports(package):
        if each.imported.partition(".")[0] == package:
            edges[each.importer].add(each.imported)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            todo += (new := edges[todo.pop()] - seen)
            seen |= new
        return seen

    after = {module: reached(module) for module in modules(package)}
    return {
        tuple(sorted({m for m in after[module] if module in after[m]} | {module}))
        for module in modules(package)
        if module in after[module]
    }


def test_files_import_each_other_only_where_two_are_one_idea():
    found = {tuple(m.partition(".")[2] for m in group) for group in circles("miles_core") | circles("miles_embedded")}
    assert found == set(CIRCLES)
