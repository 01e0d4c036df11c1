"""The hooks: frozen by snapshot, documented one by one, each implemented by a test."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from miles_core.contracts import hooks
from miles_core.contracts.hooks import MAKERS, HookSpecs
from miles_core.plugin.core import CORE
from miles_core.plugin.discovery import discover
from miles_core.plugin.scan import hooks_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
NAMES = [name for name in vars(HookSpecs) if not name.startswith("_")]
#: Core, and the backend that ships with it: models and decoders are a backend's to ask for.
SOURCES = [p for package in ("miles_core", "miles_workers", "miles_embedded") for p in (ROOT / package).rglob("*.py")]
PROCESSES = ("driver", "every process", "every trainer rank", "owning process", "rollout worker")


def arguments(name):
    return [a for a in inspect.signature(getattr(HookSpecs, name)).parameters if a != "self"]


def surface():
    lines = [f"{name}({', '.join(arguments(name))})" for name in NAMES]
    return "\n".join([*lines, *(f"make_{kind}({', '.join(takes)})" for kind, (takes, _, _) in MAKERS.items())]) + "\n"


def test_names_and_arguments_are_as_published():
    """Changing a hook takes a line in CHANGELOG.md and a new snapshot: what ``surface()`` returns."""
    assert surface() == (Path(__file__).parent / "hooks.snapshot.txt").read_text()


@pytest.mark.parametrize("call", surface().splitlines())
def test_every_hook_has_a_section_with_its_process_and_an_example(call):
    name = call.partition("(")[0]
    heading = next((line for line in PAGE.splitlines() if line.startswith("### ") and f"`{call}`" in line), None)
    assert heading, f"docs/hooks.md has no section headed `{call}`"
    section = PAGE[PAGE.index(heading) :].split("\n### ")[0]
    assert any(process in section.lower() for process in PROCESSES), f"{name}: in which process?"
    assert "```python" in section
    if name.startswith("make_"):
        assert f'"{name.removeprefix("make_")}": {{' in section
    else:
        assert f"def {name}(" in section


@pytest.mark.parametrize("name", NAMES)
def test_every_hook_says_where_it_runs_and_has_a_test(name):
    assert "Runs in:" in " ".join(inspect.getdoc(getattr(HookSpecs, name)).split())
    tests = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "plugins").glob("*/tests/*.py")]
    assert any(f"def {name}(" in path.read_text(encoding="utf-8") for path in tests)


@pytest.mark.parametrize("kind", MAKERS)
def test_core_asks_for_every_kind_of_part(kind):
    asked = rf'\.make\(\s*"{kind}"'
    assert any(re.search(asked, p.read_text(encoding="utf-8")) for p in SOURCES)


@pytest.mark.parametrize("name", NAMES)
def test_core_calls_every_hook(name):
    called = re.compile(rf'(?:\.on|\.chain)\(\s*"{name}"')
    assert any(called.search(p.read_text(encoding="utf-8")) for p in SOURCES)


def test_the_map_names_every_hook():
    for name in [*NAMES, *(f"make_{kind}" for kind in MAKERS)]:
        stem = name.removeprefix("wrap_")
        assert name in hooks.__doc__ or (name.startswith("wrap_") and stem in hooks.__doc__), name


def test_the_page_names_no_hook_that_does_not_exist():
    known = {*NAMES, *(f"make_{kind}" for kind in MAKERS)}
    assert set(re.findall(r"\b(?:on|wrap|make)_[a-z]+(?:_[a-z]+)*\b", PAGE)) - known <= set()


def implementers() -> dict[str, list[str]]:
    """Return hook -> what implements it: core, the plugins in its wheel, and those in plugins/."""
    catalogue = discover()
    ours = [CORE, *(p for p in catalogue.values() if p.standard or p.name == "embedded")]
    ours += [
        catalogue[path.name] for path in sorted((ROOT / "plugins").iterdir()) if (path / "pyproject.toml").is_file()
    ]
    found = {name: [p.name for p in ours if name in hooks_of(p)] for name in NAMES}
    return found | {f"make_{kind}": [p.name for p in ours if kind in p.provides] for kind in MAKERS}


def test_every_hook_has_an_implementer_that_the_page_names():
    found = implementers()
    assert [name for name, plugins in found.items() if not plugins] == []
    rows = "\n".join(f"| `{name}` | {', '.join(plugins)} |" for name, plugins in found.items())
    assert f"| hook | implemented by |\n|---|---|\n{rows}\n" in PAGE, f"docs/hooks.md needs this table:\n{rows}"
