"""The constraint files: their versions are those that are tested, and every distribution of this repository accepts them.

``make constraints`` resolves them, with metadata from the package index.
"""

import re
import runpy
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "constraints" / "resolve.py"))
STACKS = SCRIPT["STACKS"]


def lines(name):
    text = (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8")
    return [Requirement(line) for line in text.splitlines() if not line.startswith("#")]


def test_every_file_is_of_a_stack_and_has_its_title():
    assert {path.stem for path in (ROOT / "constraints").glob("*.txt")} == set(STACKS)
    for name, stack in STACKS.items():
        assert (ROOT / "constraints" / f"{name}.txt").read_text(encoding="utf-8").startswith(f"# {stack.title}. ")


@pytest.mark.parametrize("name", STACKS)
def test_core_and_plugins_accept_the_versions(name):
    machine = {"sys_platform": "linux", "platform_machine": "x86_64", "python_version": "3.12", "extra": ""}
    found = {canonicalize_name(r.name): r for r in lines(name) if r.marker is None or r.marker.evaluate(machine)}
    for text in [*SCRIPT["requirements_of_projects"](name == "cpu"), *STACKS[name].requirements]:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate(machine):
            continue
        (pin,) = found[canonicalize_name(wanted.name)].specifier
        assert pin.version in wanted.specifier, f"{name}: {text}, and the file has {pin.version}"


@pytest.mark.parametrize("name", [name for name, stack in STACKS.items() if stack.locks])
def test_the_versions_of_the_engines_are_the_tested_ones(name):
    found = {canonicalize_name(r.name): next(iter(r.specifier)).version for r in lines(name)}
    tested = {}
    for path in STACKS[name].locks:
        tested |= SCRIPT["pins"]((ROOT / path).read_text(encoding="utf-8"))
    same = {key: version for key, version in tested.items() if canonicalize_name(key) in found}
    assert all(found[canonicalize_name(key)] == version for key, version in same.items())
    assert {"sglang", "torch", "transformers"} <= same.keys()
    assert any(key.startswith("nvidia-c") for key in found) == STACKS[name].cuda


def test_the_cpu_file_has_the_torch_of_the_makefile():
    (torch,) = re.findall(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert torch in [str(line) for line in lines("cpu")]
