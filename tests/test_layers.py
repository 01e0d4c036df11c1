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
        "text": "",
        "cache_folder": "",
    },
    {
        "chat": "errors text",
    },
    {
        "data": "errors text chat cache_folder",
    },
    {
        "plugin": "errors nearest version redact text data",
    },
    {
        "config": "errors nearest redact plugin",
        "observe": "errors redact plugin cache_folder",
        "checkpoint": "errors version text data",
    },
    {
        "algorithm": "errors data",
        "precision": "errors data config",
    },
    {
        "contracts": "errors data plugin config observe checkpoint algorithm precision",
    },
    {
        "reward": "errors text chat data",
    },
    {
        "sync": "errors data precision contracts",
    },
    {
        "rollout": "errors text chat data plugin config observe contracts reward",
        "train": "errors data plugin config checkpoint algorithm precision contracts sync",
    },
    {
        "schedule": "contracts rollout",
        "mismatch": "errors data plugin precision contracts sync rollout",
    },
    {
        "run": "errors text redact data plugin config observe checkpoint contracts reward rollout train mismatch",
    },
    {
        "defaults": "reward sync rollout train schedule mismatch run",
    },
    {
        "loop": "errors contracts sync rollout run",
    },
    {
        "launch": "errors redact plugin config observe checkpoint contracts run loop",
    },
    {
        "primitives": "errors data plugin config observe checkpoint contracts sync rollout train run",
        "cli": "errors nearest version redact plugin config contracts run launch",
    },
    {
        "api": "plugin config observe run launch primitives",
    },
    {
        "__main__": "cli",
    },
]

#: The number formats' machinery, one layer in itself.
FORMATS: list[dict[str, str]] = [
    {
        "formats": "core: cache_folder checkpoint config data errors lookup nearest observe plugin precision sync version",
    },
]

#: Ranks, engines and rollouts in other processes, over the transport of weights between them.
WORKERS: list[dict[str, str]] = [
    {
        "workers": "core: checkpoint config contracts data errors lookup mismatch plugin precision redact rollout run sync train version formats: formats",
    },
]

#: What a user runs besides training.
TOOLS: list[dict[str, str]] = [
    {
        "foreign": "core: config nearest",
        "output_file": "core: errors redact",
        "profiler": "core: contracts",
        "samples": "core: contracts data errors redact workers: workers",
        "http_client": "core: errors redact",
        "http_server": "core: errors",
    },
    {
        "alerts": "http_client core: contracts errors redact",
        "engine_server": "http_client core: redact rollout workers: workers",
        "command_line": "foreign core: config",
        "rewards": "http_client core: chat contracts data errors redact reward",
        "report": "output_file samples core: checkpoint errors observe plugin redact version",
        "authoring": "core: config errors nearest plugin version",
        "demo": "core: data errors observe plugin",
    },
    {
        "sinks": "alerts core: config contracts errors plugin redact version",
        "verify": "http_client output_file report core: config contracts data errors mismatch plugin precision redact rollout run version",
        "replay": "samples report core: checkpoint config contracts data errors launch observe plugin rollout run version workers: workers",
        "watch": "report core: errors",
    },
    {
        "examine": "rewards replay core: checkpoint config errors plugin formats: formats",
        "commands": "report authoring demo verify replay watch core: checkpoint cli config contracts errors observe plugin precision redact run formats: formats",
    },
]

#: The rooms of ``miles_embedded``.
ROOMS: list[dict[str, str]] = [
    {
        "memory": "core: miles_core.plugin miles_core.trainer",
        "plan_notes": "",
        "speed": "",
    },
    {
        "manifest": "plan_notes core: miles_core miles_core.plugin",
        "kernels": "core: errors",
    },
    {
        "model": "manifest kernels core: checkpoint contracts data errors observe plugin formats: formats",
    },
    {
        "known": "model core: checkpoint errors plugin",
        "quantized": "model core: contracts data errors precision sync formats: formats",
    },
    {
        "engine": "manifest kernels model quantized core: contracts data errors precision sync workers: workers",
        "trainer": "kernels model quantized core: checkpoint contracts data errors precision train",
    },
    {
        "testing": "manifest model quantized engine trainer core: contracts data errors lookup plugin train formats: formats testing: testing",
    },
]

#: The test kit, one layer in itself.
TESTING: list[dict[str, str]] = [
    {
        "testing": "core: api chat checkpoint config contracts data errors launch lookup mismatch observe plugin precision run version formats: formats workers: workers tools: demo",
    },
]

#: Import package -> its layers. Packages with one layer count as a whole.
TABLES: dict[str, list[dict[str, str]]] = {
    "miles_core": LAYERS,
    "miles_formats": FORMATS,
    "miles_workers": WORKERS,
    "miles_embedded": ROOMS,
    "miles_tools": TOOLS,
    "miles_testing": TESTING,
}

#: Modules that define nothing and name what plugins may use; nothing else in their own distribution imports them.
PUBLIC = (
    "miles_core",
    "miles_core.plugin",
    "miles_core.data",
    "miles_core.chat",
    "miles_core.engine",
    "miles_core.trainer",
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
    """The entry of a table that a module belongs to: ``miles_core.plugin.rule`` -> ``plugin``, ``miles_workers.transport.bucket`` ->
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
    against = [
        str(each)
        for each in imports(root)
        # what a backend tells the planner is imported by the planner alone
        if each.imported.partition(".")[0] not in own and not each.importer.endswith(".planning")
    ]
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
