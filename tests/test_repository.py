"""Rules of the repository that a reader would otherwise have to check: what core may name, what imports torch, sizes."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings

from miles_core.config.groups import GROUPS
from miles_core.plugin.discovery import discover
from miles_core.plugin.options import METADATA_KEY
from miles_tools.authoring.scaffold import write_plugin

ROOT = Path(__file__).parents[1]
CORE = sorted((ROOT / "miles_core").rglob("*.py"))
SIBLINGS = ("miles_embedded", "miles_formats", "miles_workers", "miles_tools", "miles_testing")
BACKEND = sorted(path for name in SIBLINGS for path in (ROOT / name).rglob("*.py"))
SOURCES = [*CORE, *BACKEND, *sorted(ROOT.glob("plugins/*/miles_*/**/*.py"))]
FILE_LINES, FUNCTION_LINES = 400, 50

#: Texts that ship with core: code, docstrings and comments, tables, pages.
TEXTS = [
    p
    for p in sorted((ROOT / "miles_core").rglob("*"))
    if p.suffix in (".py", ".toml", ".yaml", ".html", ".md", ".json")
]
#: Plugins of this repository, backends, and the software behind them.
FEATURES = {p.name for p in (ROOT / "plugins").iterdir() if (p / "pyproject.toml").is_file()}
FEATURES -= {"ppo"}  # its clipped loss is core's, as the loss of most estimators; the plugin adds the critic
FEATURES |= {"embedded", "sglang", "megatron", "ray", "transformer_engine", "transformerengine"}
#: Names that are also ordinary words (the ``tools`` of a chat template): there the plugin's package is looked for.
ORDINARY = {
    "tools": "miles_tool_calls",
    "environments": "miles_environments",
    "planner": "miles_planner",
    "experts": "miles_experts",
    "optimizers": "miles_optimizers",
    "offline": "miles_offline",
    "service": "miles_service",
}
FEATURES = {ORDINARY.get(name, name) for name in FEATURES}
NAMED = re.compile(rf"(?<![a-z0-9])({'|'.join(sorted(FEATURES))})(?![a-z0-9])", re.IGNORECASE)

PROJECTS = sorted(p for where in ("", "plugins/*/", "examples/*/") for p in ROOT.glob(f"{where}pyproject.toml"))

#: The modules that plugins and examples may import; the others may change without notice.
PUBLIC = (
    "miles_core",
    "miles_core.api",
    "miles_core.data",
    "miles_core.engine",
    "miles_formats",
    "miles_core.plugin",
)
PUBLIC += ("miles_core.trainer", "miles_testing", "miles_workers.transport", "miles_workers.servers")
PUBLIC += (
    "miles_core.chat",
    "miles_workers",
    "miles_core.observe.bytecode",
    "miles_formats.convert",
    "miles_tools.engine_server",
    "miles_tools.http_client",
    "miles_tools.http_server",
    "miles_formats.native",
)
PUBLIC_OF_A_BACKEND = ("miles_embedded", "miles_embedded.testing", "miles_embedded.kernels.overlap")
#: These define kernels.
NEEDS_TRITON = ("miles_embedded.kernels.overlap",)
OUTSIDE = sorted(path for where in ("plugins/*/miles_*/**/*.py", "examples/**/*.py") for path in ROOT.glob(where))
#: Commands with core's own options: runs and plans for hardware that is elsewhere, and the primitives of a policy over HTTP.
OUTSIDE = [path for path in OUTSIDE if not {"miles_planner", "miles_service"} & {*path.parts}]


def by_folder(paths):
    """Parametrise a test with the files of each folder: one test per file takes longer than the test itself."""
    folders = {}
    for path in paths:
        folders.setdefault(path.parent.relative_to(ROOT).as_posix(), []).append(path)
    return pytest.mark.parametrize("paths", folders.values(), ids=folders)


def test_every_public_module_has_a_page_of_its_own():
    modules = {*PUBLIC, *PUBLIC_OF_A_BACKEND} - {"miles_core"}
    assert {path.stem for path in (ROOT / "docs" / "api").glob("*.md")} == modules
    assert all(f"::: {m}\n" in (ROOT / "docs" / "api" / f"{m}.md").read_text(encoding="utf-8") for m in modules)


@by_folder(TEXTS)
def test_core_names_no_feature_and_no_backend(paths):
    lines = [(p.name, *line) for p in paths for line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1)]
    found = [f"{name}:{number}: {line.strip()}" for name, number, line in lines if NAMED.search(line)]
    assert not found, "these lines name what plugins do:\n" + "\n".join(found)


def public_names(module):
    """Return ``__all__`` of a public module; that of a module of kernels is read from its source."""
    if module not in NEEDS_TRITON:
        return import_module(module).__all__
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    listed = re.search(r"^__all__ = (\[.*\])$", source, re.MULTILINE)
    return ast.literal_eval(listed[1])


def private_imports(source):
    """What a file imports from core or the backend that ships with it beside what is public."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (
                n.name for n in node.names if n.name.startswith(("miles_core.", *(f"{name}." for name in SIBLINGS)))
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("miles_core", *SIBLINGS):
            shown = public_names(node.module) if node.module in (*PUBLIC, *PUBLIC_OF_A_BACKEND) else ()
            yield from (f"{node.module}.{n.name}" for n in node.names if n.name not in shown)


@by_folder(OUTSIDE)
def test_plugins_and_examples_import_public_names_only(paths):
    found = {p.name: list(private_imports(p.read_text(encoding="utf-8"))) for p in paths}
    assert {name: private for name, private in found.items() if private} == {}


def test_pages_and_generated_plugins_import_public_names_only(tmp_path):
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("plugins/*/README.md")]
    blocks = {p: re.findall(r"^```python\n(.*?)^```$", p.read_text("utf-8"), re.MULTILINE | re.DOTALL) for p in pages}
    for name in ("one", "two"):
        written = write_plugin(name, tmp_path / name, format=name == "two")
        blocks |= {path: [path.read_text("utf-8")] for path in written if path.suffix == ".py"}
    found = {p.name: [n for code in codes for n in private_imports(code)] for p, codes in blocks.items()}
    assert {name: private for name, private in found.items() if private} == {}


def test_the_rule_for_imports_can_fail():
    source = "from miles_core.errors import MilesError\nfrom miles_core.plugin import Plugin, plan\nimport miles_embedded.model"
    assert list(private_imports(source)) == [
        "miles_core.errors.MilesError",
        "miles_core.plugin.plan",
        "miles_embedded.model",
    ]


@by_folder(SOURCES)
def test_files_and_functions_are_short(paths):
    for path in paths:
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= FILE_LINES, path.name
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= FUNCTION_LINES, f"{path.name}: {node.name} has {length} lines"


def test_no_file_is_called_utils():
    assert not [p for p in SOURCES if p.stem in ("utils", "util", "helpers", "misc", "common")]


def test_commands_of_results_name_no_path_of_a_machine():
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    commands = {path.name: json.loads(path.read_text(encoding="utf-8")).get("command", "") for path in files}
    assert commands and not [name for name, command in commands.items() if re.search(r"(^|[ =])/", command)]


def test_manifests_flags_and_the_command_line_import_no_torch():
    code = """
import sys
from miles_core.plugin.discovery import discover
found = list(discover())
assert found, "no plugin is installed"
import miles_core.config.load, miles_core.cli.main, miles_core.cli.train, miles_core.plugin.resolve
import miles_testing, miles_testing.plugin
from miles_core.data import Field
from miles_core.plugin import Plugin, Rule, Pair, Set, hookimpl, option, StateKey, MilesError
miles_core.cli.main.main(["train", "--help"])
heavy = {"torch", "transformers", "pyarrow", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", [*PUBLIC, *PUBLIC_OF_A_BACKEND])
def test_public_names_exist_and_are_known_to_type_checkers(module):
    if module in NEEDS_TRITON:
        pytest.importorskip("triton")
    found = import_module(module)
    assert all(getattr(found, name) is not None for name in found.__all__)
    assert len(found.__all__) == len(set(found.__all__)) and set(found.__all__) <= {*dir(found), *vars(found)}
    tree = ast.parse(Path(found.__file__).read_text(encoding="utf-8"))
    imported = {(n.asname or n.name) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for n in node.names}
    defined = {name for name in found.__all__ if name in vars(found) and name not in imported}
    assert set(found.__all__) - defined <= imported, "not imported for type checking"
    with pytest.raises((AttributeError, ImportError)):
        _ = found.Nothing


@pytest.mark.parametrize("name", list(discover()))
def test_a_plugins_page_documents_its_flags(name):
    own = (*ROOT.glob(f"plugins/{name}/miles_*"), *ROOT.glob(f"*/*/miles_{name}"), ROOT / "miles_core")
    manifest, home = discover()[name], own[0].parent
    pages = {"embedded": "embedded.md", "sinks": "metrics.md", "replay": "replay.md"}  # plugins of core's wheel
    page = ROOT / "docs" / pages[name] if name in pages else home / "README.md"
    page = page.read_text(encoding="utf-8")
    flags = [*manifest.aliases]
    for field in dataclasses.fields(manifest.config) if manifest.config else ():
        info = field.metadata[METADATA_KEY]
        flags += [info.flag or f"--{field.name.replace('_', '-')}", *info.aliases]
    families = tuple(re.findall(r"`(--[a-z-]+-)NAME`", page))  # another program's options, listed by --help
    assert not [flag for flag in flags if flag not in page and not flag.startswith(families)]


def test_every_option_of_core_is_used():
    """A flag that does nothing is a defect: some module outside of the configuration reads it."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in [*CORE, *BACKEND] if "config" not in p.parts)
    idle = [
        f"{table}.{field.name}"
        for table, group in GROUPS.items()
        for field in dataclasses.fields(group)
        if not re.search(rf"\.{field.name}\b", text)
    ]
    assert not idle


@pytest.mark.parametrize(
    "project",
    sorted(p for where in ("", "plugins/*/", "examples/*/") for p in ROOT.glob(f"{where}pyproject.toml")),
    ids=lambda p: p.parent.name,
)
def test_every_distribution_can_be_published(project):
    """Licence and classifiers are in each of them, and a readme whose links lead somewhere outside of here too."""
    said = tomllib.loads(project.read_text())["project"]
    assert said["license"] == "Apache-2.0" and said["license-files"] == ["LICENSE"] and len(said["classifiers"]) > 4
    assert (project.parent / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    links = re.findall(r"\]\(([^)]+)\)", (project.parent / said["readme"]).read_text(encoding="utf-8"))
    assert not [link for link in links if not link.startswith(("https://", "#"))]


def test_examples_of_hypothesis_have_no_deadline():
    """The time of an example says nothing on a busy machine; the root's conftest.py has the profile."""
    assert settings.default.deadline is None
