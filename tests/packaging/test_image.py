"""The Dockerfile: its files exist, its instructions are known, and its versions are those of the engine tests."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
#: Instructions, with continued lines joined and comments removed.
INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
    if line.strip()
]


def test_instructions_are_known_and_their_files_exist():
    assert INSTRUCTIONS[0][0] == "FROM"
    assert {name for name, _ in INSTRUCTIONS} <= {"FROM", "ENV", "RUN", "COPY", "WORKDIR", "CMD"}
    for name, rest in INSTRUCTIONS:
        if name == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
        if name == "RUN":
            assert subprocess.run(["bash", "-n"], input=rest, text=True, check=False).returncode == 0, rest


def constraints(tmp_path):
    """Run the step that writes the constraints, on the files that the image copies."""
    lock = tmp_path / "lock"
    lock.mkdir()
    for _, rest in (pair for pair in INSTRUCTIONS if pair[0] == "COPY" and "/lock/" in pair[1]):
        for source in rest.split()[:-1]:
            (lock / Path(source).name).write_bytes((ROOT / source).read_bytes())
    step = next(rest for name, rest in INSTRUCTIONS if name == "RUN" and "constraints.txt" in rest)
    command = step.partition("&&")[0].replace("/lock/", f"{lock}/")
    subprocess.run(["bash", "-c", command], check=True)
    return dict(line.split("==") for line in (lock / "constraints.txt").read_text(encoding="utf-8").split())


def test_the_constraints_are_the_versions_of_the_engine_tests(tmp_path):
    found = constraints(tmp_path)
    pinned = {}
    for name in ("common", "sglang", "megatron"):
        text = (ROOT / f"tests/engines/{name}.txt").read_text(encoding="utf-8")
        pinned |= dict(re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE))
    assert pinned.items() <= found.items() and len(pinned) > 60
    assert {"torch", "transformer-engine", "ray"} == found.keys() - pinned.keys()


def test_plugins_accept_the_versions_of_the_image(tmp_path):
    from packaging.specifiers import SpecifierSet

    from miles_megatron import CORE, ENGINE
    from miles_sglang.installed import TESTED

    found = constraints(tmp_path)
    for name, wanted in (("sglang", TESTED), ("megatron-core", CORE), ("transformer-engine", ENGINE)):
        assert found[name] in SpecifierSet(wanted), name
