"""Layers: which package may import which. This table is the architecture; ``docs/structure.md`` is drawn from it."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Package -> the packages it may import, in rows: each imports from rows above its own only, so there is no cycle. Modules
#: directly in ``miles_core`` count as packages. Imports for type checking and inside functions count like any other. A word
#: with a colon names the distribution package that the words after it belong to: ``core: errors`` is ``miles_core.errors``.
LAYERS: list[dict[str, str]] = [
    {
        "errors": "",
        "nearest": "",
        "lookup": "",
        "version": "",
        "redact": "",
    },
    {
        "data": "errors",
    },
    {
        "plugin": "errors nearest version redact data",
    },
    {
        "config": "errors nearest redact plugin",
        "observe": "errors redact plugin",
        "checkpoint": "errors version data",
    },
    {
        "algorithm": "errors data",
        "reward": "errors data",
        "precision": "errors nearest data plugin config checkpoint",
    },
    {
        "contracts": "errors data plugin config observe checkpoint algorithm precision",
    },
    {
        "sync": "errors data precision contracts",
    },
    {
        "rollout": "errors data plugin config observe reward contracts",
        "train": "errors data plugin config checkpoint algorithm precision contracts sync",
    },
    {
        "schedule": "plugin contracts rollout",
    },
    {
        "run": "errors version redact data plugin config observe checkpoint reward contracts rollout",
    },
    {
        "loop": "errors contracts rollout sync run",
    },
    {
        "launch": "errors redact plugin config observe checkpoint contracts run loop",
    },
    {
        "cli": "errors nearest version redact plugin config run launch",
        "api": "plugin config observe run launch",
    },
    {
        "__main__": "cli",
    },
]

#: Compiled helpers, and what attaches to core as a third party would.
TOOLS: list[dict[str, str]] = [
    {
        "bytecode": "",
        "cuda_context": "",
        "transformers_import": "",
    },
    {
        "environment": "bytecode core: redact",
        "output_file": "core: errors redact",
        "progress": "core: observe",
        "sinks": "core: errors redact contracts",
        "profiler": "core: contracts",
        "samples": "core: errors redact data contracts runtime: runtime",
        "parquet": "core: errors data",
    },
    {
        "native": "environment core: errors",
        "http_client": "core: errors redact",
        "hints": "core: miles_core.plugin",
        "help": "core: errors nearest config",
        "foreign": "core: nearest config",
    },
    {
        "command_line": "foreign core: config",
        "rewards": "http_client core: errors redact data reward contracts",
        "convert": "core: errors nearest lookup data plugin config checkpoint precision",
        "report": "environment output_file progress samples core: errors version redact plugin observe run "
        "mismatch: mismatch",
        "authoring": "core: errors nearest version plugin config",
        "demo": "transformers_import core: errors plugin observe",
    },
    {
        "verify": "output_file report core: version data precision contracts mismatch: mismatch",
    },
    {
        "examine": "rewards convert sinks core: plugin config",
        "commands": "cuda_context environment convert report authoring demo verify core: errors redact plugin config observe checkpoint "
        "precision contracts run cli",
    },
]

#: What moves weights between processes, one layer in itself.
TRANSPORT: list[dict[str, str]] = [
    {
        "transport": "core: errors lookup data precision tools: native",
    },
]

#: How models write tool calls, one layer in itself.
CHAT: list[dict[str, str]] = [
    {
        "chat": "core: lookup miles_core.data miles_core.plugin",
    },
]

#: Engine against trainer, one layer in itself.
MISMATCH: list[dict[str, str]] = [
    {
        "mismatch": "core: errors data plugin precision contracts rollout sync",
    },
]

#: Where the parts of a run are, one layer in itself.
RUNTIME: list[dict[str, str]] = [
    {
        "runtime": "core: errors lookup redact data plugin config checkpoint precision contracts rollout train sync "
        "run mismatch: mismatch",
    },
]

#: When samples are generated beside training, one layer in itself.
SCHEDULES: list[dict[str, str]] = [
    {
        "schedules": "core: contracts rollout schedule",
    },
]

#: Runs on a virtual clock, one layer in itself.
SIMULATION: list[dict[str, str]] = [
    {
        "simulation": "core: errors data plugin config observe precision contracts rollout train run loop miles_core "
        "miles_core.plugin runtime: runtime planning: planning tools: report samples",
    },
]

#: What runs where, and how fast, one layer in itself.
PLANNING: list[dict[str, str]] = [
    {
        "planning": "core: miles_core.plugin plugin config run embedded: miles_embedded tools: commands",
    },
]

#: The rooms of ``miles_embedded``.
ROOMS: list[dict[str, str]] = [
    {
        "memory": "core: miles_core.plugin miles_core.trainer",
        "manifest": "core: miles_core miles_core.plugin",
        "speed": "",
    },
    {
        "kernels": "core: errors",
    },
    {
        "model": "manifest kernels core: errors data plugin checkpoint precision contracts tools: environment convert transformers_import",
    },
    {
        "known": "model core: errors checkpoint plugin",
        "quantized": "model core: errors data precision contracts sync",
    },
    {
        "engine": "manifest model quantized kernels core: errors data precision contracts sync transport: transport",
        "trainer": "model quantized kernels core: errors data plugin checkpoint precision contracts train",
    },
    {
        "testing": "manifest model quantized engine trainer core: errors lookup data plugin precision contracts train "
        "testing: testing",
    },
]

#: The test kit, one layer in itself.
TESTING: list[dict[str, str]] = [
    {
        "testing": "core: api errors lookup version checkpoint data plugin config observe precision contracts run launch mismatch: "
        "mismatch runtime: runtime tools: demo transport: transport",
    },
]

#: Import package -> its layers. Packages with one layer count as a whole.
TABLES: dict[str, list[dict[str, str]]] = {
    "miles_core": LAYERS,
    "miles_chat": CHAT,
    "miles_mismatch": MISMATCH,
    "miles_planning": PLANNING,
    "miles_runtime": RUNTIME,
    "miles_schedules": SCHEDULES,
    "miles_simulation": SIMULATION,
    "miles_tools": TOOLS,
    "miles_transport": TRANSPORT,
    "miles_testing": TESTING,
    "miles_embedded": ROOMS,
}

#: Modules that define nothing and name what plugins may use; nothing else in their own distribution imports them.
PUBLIC = (
    "miles_core",
    "miles_core.plugin",
    "miles_core.data",
    "miles_core.engine",
    "miles_core.trainer",
    "miles_core.format",
    "miles_embedded",
    "miles_tools",
)

#: Plugins and examples: import package -> its folder.
PLUGINS = {
    p.name: p for where in ("plugins", "examples") for p in sorted((ROOT / where).glob("*/miles_*")) if p.is_dir()
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
def modules(root: str) -> dict[str, Path]:
    """Dotted name -> file of an import package, packages under the name of their ``__init__``."""
    found = {}
    folder = PLUGINS.get(root, ROOT / root)
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@cache
def imports(root: str) -> tuple[Import, ...]:
    """Every import in ``root`` of a module of this repository."""
    known = {name for each in (*TABLES, *PLUGINS) for name in modules(each)}
    found = []
    for importer, file in modules(root).items():
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
    """The entry of a table that a module belongs to: ``miles_core.plugin.rule`` -> ``plugin``, ``miles_transport.bucket`` ->
    ``transport``; a public module is itself."""
    root = module.split(".")[0]
    if len(TABLES.get(root, [])) == 1:
        return root.removeprefix("miles_")
    return module if module in PUBLIC or "." not in module else module.split(".")[1]


def found_in(root: str, package: str) -> dict[str, list[Import]]:
    """Imports of ``package`` by target: another package of its root, or ``core:NAME``."""
    found: dict[str, list[Import]] = defaultdict(list)
    for each in imports(root):
        target, other = each.imported.split(".")[0], package_of(each.imported)
        if package_of(each.importer) == package and not (target == root and other == package):
            found[other if target == root else f"{target.removeprefix('miles_')}:{other}"].append(each)
    return found


def allowed_in(entry: str) -> set[str]:
    """The targets that an entry of a table allows, written as ``found_in`` writes them."""
    allowed, root = set(), ""
    for word in entry.split():
        if word.endswith(":"):
            root = word
        else:
            allowed.add(f"{root}{word}")
    return allowed


ENTRIES = [(root, *pair) for root, table in TABLES.items() for row in table for pair in row.items()]


@pytest.mark.parametrize("root", TABLES)
def test_every_entry_names_rows_above_its_own(root):
    above: set[str] = set()
    for row in TABLES[root]:
        for package, entry in row.items():
            own = {name for name in allowed_in(entry) if ":" not in name}
            assert own <= above, f"{package} imports from its own row or one below"
        above |= row.keys()


def test_import_packages_do_not_import_each_other():
    edges = {root: {each.imported.split(".")[0] for each in imports(root)} - {root} for root in TABLES}
    order = list(TopologicalSorter(edges).static_order())  # raises CycleError
    assert order[0] == "miles_core"


@pytest.mark.parametrize("root", TABLES)
def test_every_package_has_a_row(root):
    packages = {package_of(m) for m in modules(root) if m not in PUBLIC}
    assert packages == {package for row in TABLES[root] for package in row}


@pytest.mark.parametrize(("root", "package", "entry"), ENTRIES, ids=[f"{root}.{name}" for root, name, _ in ENTRIES])
def test_a_package_imports_what_the_table_says(root, package, entry):
    found, allowed = found_in(root, package), allowed_in(entry)
    against = [str(each) for other, every in found.items() if other not in allowed for each in every]
    assert not against, f"{package} may import {entry or 'nothing'}:\n" + "\n".join(against)
    unused = sorted(allowed - found.keys())
    assert not unused, f"{package} does not import {', '.join(unused)} any more: take it out of the table"


def test_core_imports_no_sibling_no_backend_and_no_plugin():
    against = [str(each) for each in imports("miles_core") if each.imported.partition(".")[0] != "miles_core"]
    assert not against, "\n".join(against)


@pytest.mark.parametrize("root", PLUGINS)
def test_a_plugin_imports_no_other_plugin(root):
    own = {root, *TABLES}
    against = [str(each) for each in imports(root) if each.imported.partition(".")[0] not in own]
    assert not against, "\n".join(against)


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The files of one circle of imports, if there is any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("root", [*TABLES, *PLUGINS])
def test_no_files_import_each_other_in_a_circle(root):
    graph: dict[str, set[str]] = defaultdict(set)
    for each in imports(root):
        if each.imported.partition(".")[0] == root:
            graph[each.importer].add(each.imported)
    assert not circle_in(graph)


def test_no_benchmarks_import_each_other_in_a_circle():
    files = {file.stem: file for file in sorted((ROOT / "benchmarks").rglob("*.py"))}
    graph: dict[str, set[str]] = defaultdict(set)
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                graph[name] |= files.keys() & {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                graph[name] |= files.keys() & {str(node.module)}
    assert not circle_in(graph)
