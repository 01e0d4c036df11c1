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
    {"errors": "", "nearest": "", "lookup": "", "stash": "", "version": ""},
    {"data": "errors"},
    {"plugin": "errors nearest version data"},
    {
        "config": "errors nearest plugin",
        "observe": "errors version plugin",
        "checkpoint": "errors version data",
    },
    {
        "native": "errors observe",
        "algorithm": "errors",
        "reward": "errors data",
        "precision": "errors nearest data plugin config checkpoint",
    },
    {
        "contracts": "errors stash data plugin config observe checkpoint algorithm precision",
        "convert": "errors data checkpoint precision",
    },
    {
        "rollout": "errors data config observe reward contracts",
        "train": "errors data plugin config checkpoint algorithm contracts",
        "sync": "errors native data precision contracts",
    },
    {"schedule": "plugin contracts rollout"},
    {"mismatch": "errors stash version data plugin observe precision contracts rollout sync"},
    {
        "run": "errors version data plugin config observe checkpoint reward precision contracts convert rollout train sync mismatch"
    },
    {
        "loop": "errors contracts rollout sync mismatch run",
        "remote": "errors data plugin config checkpoint precision contracts sync mismatch run",
    },
    {
        "launch": "errors plugin config observe checkpoint contracts run loop",
        "demo": "errors plugin observe",
    },
    {
        "cli": "errors nearest version plugin config observe checkpoint precision contracts mismatch run launch convert demo",
        "testing": "errors lookup version data plugin config observe precision contracts sync mismatch run remote launch demo",
        "api": "plugin config observe run launch",
    },
    {"__main__": "cli"},
]

#: The rooms of ``miles_embedded``, the same way, and behind ``core:`` what each may import of the table above.
ROOMS: list[dict[str, str]] = [
    {"manifest": "core: miles_core"},
    {"model": "manifest core: errors data plugin observe checkpoint precision contracts convert"},
    {"quantized": "model core: errors data precision contracts sync"},
    {
        "engine": "manifest model quantized core: errors data precision contracts sync",
        "trainer": "model quantized core: errors data checkpoint precision contracts train",
    },
    {
        "testing": "manifest model quantized engine trainer core: errors lookup data plugin precision contracts train testing",
    },
]

#: Modules that define nothing and name what plugins may use; nothing else in their own distribution imports them.
PUBLIC = ("miles_core", "miles_core.format", "miles_core.backend", "miles_embedded")

#: Files that import each other, and why they are one idea.
CIRCLES: dict[tuple[str, ...], str] = {
    ("precision.format", "precision.product"): "a format offers its product, a product multiplies a format's codes",
    (
        "engine.decoder",
        "engine.engine",
        "engine.scheduler",
        "engine.settings",
    ): "a decoder is one step of the engine over its rows",
    (
        "trainer.emulate",
        "trainer.nonfinite",
        "trainer.trainer",
    ): "two rare passes of the trainer, on pages of their own",
    ("quantized.activation", "quantized.linear"): "inputs are rounded for a product, or by a product that reads codes",
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
    """``miles_core.plugin.rule`` -> ``plugin``; a public module is itself."""
    return module if module in PUBLIC or "." not in module else module.split(".")[1]


def found_in(root: str, package: str) -> dict[str, list[Import]]:
    """What ``package`` imports: another package of its distribution, or ``core:NAME`` -> the imports."""
    found: dict[str, list[Import]] = defaultdict(list)
    for each in imports(root):
        own, other = each.imported.partition(".")[0] == root, package_of(each.imported)
        if package_of(each.importer) == package and not (own and other == package):
            found[other if own else f"core:{other}"].append(each)
    return found


def allowed_in(entry: str) -> set[str]:
    """The names of an entry of a table."""
    own, _, core = entry.partition("core:")
    return {*own.split(), *(f"core:{name}" for name in core.split())}


ENTRIES = [("miles_core", *pair) for row in LAYERS for pair in row.items()]
ENTRIES += [("miles_embedded", *pair) for row in ROOMS for pair in row.items()]


@pytest.mark.parametrize("table", [LAYERS, ROOMS], ids=["miles_core", "miles_embedded"])
def test_every_entry_names_rows_above_its_own(table):
    above = {"core:miles_core", *(f"core:{package}" for row in LAYERS for package in row)} - {"core:cli"}
    for row in table:
        for package, entry in row.items():
            assert allowed_in(entry) <= above, f"{package} imports from its own row or one below"
        above |= row.keys()


@pytest.mark.parametrize(("root", "table"), [("miles_core", LAYERS), ("miles_embedded", ROOMS)])
def test_every_package_has_a_row(root, table):
    assert {package_of(m) for m in modules(root) if m not in PUBLIC} == {package for row in table for package in row}


@pytest.mark.parametrize(("root", "package", "entry"), ENTRIES, ids=[f"{root}.{name}" for root, name, _ in ENTRIES])
def test_a_package_imports_what_the_table_says(root, package, entry):
    found, allowed = found_in(root, package), allowed_in(entry)
    against = [str(each) for other, every in found.items() if other not in allowed for each in every]
    assert not against, f"{package} may import {entry or 'nothing'}:\n" + "\n".join(against)
    unused = sorted(allowed - found.keys())
    assert not unused, f"{package} does not import {', '.join(unused)} any more: take it out of the table"


def test_core_imports_no_backend_and_no_plugin():
    against = [str(each) for each in imports("miles_core") if each.imported.partition(".")[0] != "miles_core"]
    assert not against, "\n".join(against)


def circles(package: str) -> set[tuple[str, ...]]:
    """Groups of files of which each imports the others, directly or through more files."""
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
    found = circles("miles_core") | circles("miles_embedded")
    assert {tuple(module.partition(".")[2] for module in group) for group in found} == set(CIRCLES)
