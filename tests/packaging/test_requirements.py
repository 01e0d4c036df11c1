"""What installing each distribution brings: engines on the machines that can have them, nothing of CUDA in a checkout."""

import runpy
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from miles_megatron import plugin as megatron
from miles_sglang import installed

ROOT = Path(__file__).parents[2]
_script = runpy.run_path(str(ROOT / "tests" / "packaging" / "third_party.py"))
ENGINES, requirements, third_party = (_script[name] for name in ("ENGINES", "requirements", "third_party"))
PROJECTS = sorted(p.parent for p in [*ROOT.glob("plugins/*/pyproject.toml"), *ROOT.glob("examples/*/pyproject.toml")])
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.12", "extra": ""}


def brought(plugin, **machine):
    """The names and versions of engines that ``pip install`` of a plugin brings on a machine."""
    found = requirements(ROOT / "plugins" / plugin)
    wanted = [r for r in found if r.name in ENGINES and (r.marker is None or r.marker.evaluate(LINUX | machine))]
    return {r.name: r.specifier for r in wanted}


def _needed(plugin):
    """Names and versions of the packages without which a plugin runs no model."""
    return [(p.name, p.versions) for p in plugin.packages if not p.without and "model.type" not in p.when]


def test_the_plugins_of_engines_bring_the_versions_they_are_tested_with():
    assert brought("sglang") == {"sglang": SpecifierSet(installed.TESTED)}
    versions = {name: SpecifierSet(version) for name, version in _needed(megatron)}
    assert brought("megatron") == versions
    [engine] = [r for r in requirements(ROOT / "plugins" / "megatron") if r.name == megatron.packages[1].name]
    assert engine.extras == {"pytorch"}  # without it TransformerEngine has no modules


@pytest.mark.parametrize(
    ("plugin", "machine", "expected"),
    [
        ("sglang", {"sys_platform": "darwin", "platform_machine": "arm64"}, set()),
        ("sglang", {"python_version": "3.11"}, {"sglang"}),
        ("megatron", {"sys_platform": "darwin", "platform_machine": "arm64"}, set()),
        ("megatron", {"python_version": "3.11"}, set()),
    ],
)
def test_a_machine_that_cannot_have_an_engine_gets_the_plugin_without_it(plugin, machine, expected):
    assert set(brought(plugin, **machine)) == expected


def test_no_other_distribution_brings_an_engine():
    for project in [ROOT, *PROJECTS]:
        names = {r.name for r in requirements(project)} & ENGINES
        assert not names or project.name in ("sglang", "megatron"), project


def test_the_needs_of_plugins_are_installed_without_the_engines():
    needs = [Requirement(text) for text in third_party(PROJECTS)]
    assert "ray" in {r.name for r in needs}
    for need in needs:
        assert need.name not in ENGINES and metadata.version(need.name) in need.specifier, need


def test_the_checkout_installs_plugins_without_their_dependencies():
    done = subprocess.run(["make", "-n", "install", "VENV=absent"], cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "./plugins/" in line]
    assert done.returncode == 0 and lines
    assert all("--no-deps" in line for line in lines)


def test_the_engines_of_make_engines_are_those_of_the_plugins():
    pinned = {}
    for name in ("common.txt", "sglang.txt", "megatron.txt"):
        lines = (ROOT / "tests" / "engines" / name).read_text().splitlines()
        entries = [line for line in lines if line and not line.startswith(("#", " "))]
        pinned |= dict(line.removesuffix(" \\").split("==") for line in entries)
        hashed = sum(line.startswith("    --hash=sha256:") for line in lines)
        assert hashed >= len(entries), f"{name}: an entry has no hash"
    assert pinned["sglang"] in brought("sglang")["sglang"]
    assert pinned["megatron-core"] in brought("megatron")["megatron-core"]
    assert not {name for name in pinned if name == "torch" or name.startswith(("nvidia-", "torch-", "flashinfer"))}
