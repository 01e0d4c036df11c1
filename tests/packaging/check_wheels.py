"""Builds every wheel and tries them where a user would: an empty environment, outside of the checkout.

    python tests/packaging/check_wheels.py --python python3.12 --torch torch==2.13.0 --out dist

Core alone comes first, then core with one plugin, then a plugin by its name from the folder of wheels. Every check is one line; the last
line counts them, and the exit status is 1 when one failed. If none failed, the wheels are in ``--out``. Called by ``make wheels``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "tis"
#: Installs from the folder of wheels, as the documentation prints it.
BY_NAME = "pip install --find-links dist miles-core miles-plugin-mxfp8"
#: What the wheel of core holds.
CORE_PACKAGES = tuple(sorted(path.parent.name for path in ROOT.glob("miles_*/__init__.py")))

ALONE = """
import miles_core, sys
from miles_testing import toy_run
assert "site-packages" in miles_core.__file__, miles_core.__file__
run = toy_run()
assert len(run.metrics) == 2 and run.metrics[-1]["train/grad_norm"] > 0
"""
WITH_PLUGIN = """
import miles_tis
from miles_testing import toy_run
assert "site-packages" in miles_tis.__file__, miles_tis.__file__
run = toy_run(plugins=["tis"])
assert run.run.plan.order == ("tis", "embedded") and run.metrics[-1]["tis/weight_mean"] > 0
"""
#: The C sources are in the wheel, and compile from where it is installed.
WITH_SOURCES = """
import shutil, miles_cpu_kernels
from miles_testing import toy_run
assert "site-packages" in miles_cpu_kernels.__file__, miles_cpu_kernels.__file__
if shutil.which("cc"):
    assert toy_run(plugins=["cpu_kernels"]).metrics[-1]["train/grad_norm"] > 0
"""


class Checks:
    """Runs commands and counts.

    Args:
        folder: where commands run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passed = self.failed = 0
        # nothing of the checkout and nothing of the caller's packages is importable
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MILES_DEBUG")
        self.environment = {k: v for k, v in os.environ.items() if k not in hidden}

    def run(
        self, what: str, command: Sequence[str | Path], expect: Callable[[str], bool] = bool, silent: bool = False
    ) -> str:
        """Run ``command``; it passes with exit status 0 and output that ``expect`` accepts (or none, if ``silent``)."""
        start = time.monotonic()
        done = subprocess.run(
            [str(c) for c in command], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        good = done.returncode == 0 and (silent or expect(done.stdout))
        self.passed, self.failed = self.passed + good, self.failed + (not good)
        print(f"{'ok' if good else 'FAILED':6} {what}  ({time.monotonic() - start:.1f} s)", flush=True)
        if not good:
            print(f"$ {' '.join(map(str, command))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}", flush=True)
        return done.stdout

    def check(self, what: str, good: bool, why: str = "") -> None:
        """Count something already known."""
        self.passed, self.failed = self.passed + good, self.failed + (not good)
        print(f"{'ok' if good else 'FAILED':6} {what}{'' if good else f': {why}'}", flush=True)


def build(checks: Checks, builder: Path, wheels: Path) -> dict[str, Path]:
    """Build a wheel of core and of each plugin, in one call of pip; name of the distribution's folder -> wheel."""
    projects = {"core": ROOT, **{p.parent.name: p.parent for p in sorted(ROOT.glob("plugins/*/pyproject.toml"))}}
    command = [builder, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels]
    checks.run(f"wheels of {', '.join(projects)}", [*command, *projects.values()], silent=True)
    made = {}
    for name, project in projects.items():
        distribution = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
        found = list(wheels.glob(f"{distribution.replace('-', '_')}-*.whl"))
        checks.check(f"one file for {name}", len(found) == 1, f"{[p.name for p in found]}")
        made[name] = next(iter(found), wheels / "missing")
    checks.check("no other file", len(list(wheels.iterdir())) == len(projects), f"{[p.name for p in wheels.iterdir()]}")
    return made


def contents(checks: Checks, wheels: dict[str, Path]) -> None:
    """A wheel has its metadata, its packages with their data files, and nothing of the tests."""
    for name, wheel in wheels.items():
        if not wheel.exists():
            continue
        files = zipfile.ZipFile(wheel).namelist()
        source = ROOT if name == "core" else ROOT / "plugins" / name
        own = tuple(path.parent.name for path in source.glob("miles_*/__init__.py"))
        packages = CORE_PACKAGES if name == "core" else own
        strangers = [f for f in files if f.partition("/")[0] not in packages and ".dist-info/" not in f]
        checks.check(f"{wheel.name} holds {', '.join(packages)} and metadata only", not strangers, f"{strangers[:3]}")
        for data in sorted(path for package in packages for path in (source / package).rglob("*")):
            if data.is_file() and data.suffix not in (".py", ".pyc"):
                wanted = data.relative_to(source).as_posix()
                checks.check(f"{wheel.name} holds {wanted}", wanted in files, "it is not there")


def engines(checks: Checks, wheels: dict[str, Path]) -> None:
    """The wheels of the plugins for production engines ask for these on Linux, without an extra."""
    for name, engine in (("sglang", "sglang"), ("megatron", "megatron-core"), ("megatron", "transformer-engine")):
        if not wheels[name].exists():
            continue
        with zipfile.ZipFile(wheels[name]) as files:
            path = next(f for f in files.namelist() if f.endswith(".dist-info/METADATA"))
            lines = files.read(path).decode().splitlines()
        asked = [line for line in lines if line.startswith(f"Requires-Dist: {engine}")]
        good = (
            len(asked) == 1 and "sys_platform == 'linux'" in asked[0].replace('"', "'") and "extra ==" not in asked[0]
        )
        checks.check(f"{wheels[name].name} asks for {engine} on Linux", good, f"{asked}")


def environment(checks: Checks, python: str, folder: Path, torch: str) -> Path:
    """An empty virtual environment with torch; returns its Python."""
    checks.run("empty environment", [python, "-m", "venv", folder], silent=True)
    inside = folder / "bin" / "python"
    checks.run(f"pip install {torch}", [inside, "-m", "pip", "install", "--quiet", torch], silent=True)
    return inside


def main() -> int:
    """Run all checks; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the Python to make environments with")
    parser.add_argument("--torch", default="torch", help="requirement to install first, e.g. torch==2.13.0")
    parser.add_argument("--out", type=Path, help="replace this folder with the wheels if every check passed")
    options = parser.parse_args()
    # pip unpacks and builds there, so that the checkout is never a build folder
    with tempfile.TemporaryDirectory(prefix="miles-wheels-") as name:
        folder = Path(name)
        checks = Checks(folder)
        wheels = folder / "dist"
        wheels.mkdir()
        inside = environment(checks, options.python, folder / "venv", options.torch)
        pip = [inside, "-m", "pip", "install", "--quiet"]
        checks.run("pip install the builders", [*pip, "flit_core>=3.11,<4", "hatchling>=1.26"], silent=True)
        built = build(checks, inside, wheels)
        contents(checks, built)
        engines(checks, built)
        miles = folder / "venv" / "bin" / "miles"
        checks.run("pip install core", [*pip, built["core"]], silent=True)
        checks.run("miles --help", [miles, "--help"], lambda out: "usage: miles COMMAND" in out)
        checks.run("miles plugins, core alone", [miles, "plugins"], lambda out: "\nembedded " in out)
        checks.run("miles train --help", [miles, "train", "--help"], lambda out: "--rollout-batch-size" in out)
        checks.run("miles plan", [miles, "plan"], lambda out: "plugins: embedded " in out)
        checks.run("toy run of core alone", [inside, "-c", ALONE], silent=True)
        checks.run(f"pip install {PLUGIN}", [*pip, built[PLUGIN]], silent=True)
        checks.run("miles plugins, one", [miles, "plugins"], lambda out: f"\n{PLUGIN} " in out)
        checks.run("miles plan with it", [miles, "plan", "--plugins", PLUGIN], lambda out: PLUGIN in out)
        checks.run("toy run with it", [inside, "-c", WITH_PLUGIN], silent=True)
        checks.run("pip install cpu_kernels", [*pip, built["cpu_kernels"]], silent=True)
        checks.run("toy run with compiled kernels", [inside, "-c", WITH_SOURCES], silent=True)
        checks.run(BY_NAME, [inside, "-m", *BY_NAME.split()], lambda out: "Successfully installed" in out)
        checks.run("miles plugins, by name", [miles, "plugins"], lambda out: "\nmxfp8 " in out)
        checks.run("pip check", [inside, "-m", "pip", "check"])
        if options.out is not None and not checks.failed:
            shutil.rmtree(options.out, ignore_errors=True)
            shutil.copytree(wheels, options.out)
    print(f"{checks.passed} passed, {checks.failed} failed")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
