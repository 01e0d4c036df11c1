"""Check that the constraint files can be installed, or write them: python constraints/resolve.py [--write] [STACK ...]

``uv`` (``pip install uv``) resolves the requirements of core and the plugins from metadata: a check downloads no package. The
packages of CUDA are left out of the file of CUDA 12, because those come from PyTorch's own index, and of the file for CPUs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

HERE = Path(__file__).parent
ROOT = HERE.parent
#: Distributions of CUDA, which have other names in each version of it.
CUDA = re.compile(r"(nvidia|cuda)-(?!ml-py)|triton")
#: Requirements that name CUDA's or an engine's distributions, and are in some stacks only.
ENGINES = ("sglang", "megatron-core", "transformer-engine")


@dataclass(frozen=True)
class Stack:
    """One installation.

    Attributes:
        title: the first line of its file.
        requirements: what it has besides core and the plugins.
        python: oldest Python version.
        platform: as in ``uv --python-platform``; "" resolves for every platform and newer Python versions.
        locks: files with the versions of the engines that it is tested with, relative to the repository. Plugins' extras are then left out:
            trackio and SGLang need different versions of Pillow.
        cuda: whether the file has the distributions of CUDA.
    """

    title: str
    requirements: tuple[str, ...]
    python: str = "3.12"
    platform: str = "x86_64-manylinux_2_39"
    locks: tuple[str, ...] = ("tests/engines/common.txt", "tests/engines/sglang.txt", "docker/gpu.txt")
    cuda: bool = True


STACKS = {
    "cpu": Stack(
        "core, its extras and all plugins without SGLang and Megatron-Core, on a CPU; also with PyTorch's CPU index",
        ("torch==2.13.0",),
        python="3.11",
        platform="",
        locks=(),
        cuda=False,
    ),
    "cuda12-sglang": Stack(
        "SGLang on CUDA 12, with --extra-index-url https://download.pytorch.org/whl/cu129; it has no packages of CUDA",
        ("sglang",),
        cuda=False,
    ),
    "cuda13-megatron": Stack(
        "SGLang and Megatron-Core on CUDA 13 (the versions of docker/Dockerfile)",
        ("sglang", "megatron-core", "transformer-engine-cu13", "mbridge"),
        locks=(
            "tests/engines/common.txt",
            "tests/engines/sglang.txt",
            "tests/engines/megatron.txt",
            "docker/gpu.txt",
        ),
    ),
}


def requirements_of_projects(extras_of_plugins: bool) -> list[str]:
    """Return what core with its extras for users, and the plugins, need from the package index."""
    found: set[str] = set()
    for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras = project.get("optional-dependencies", {}) if extras_of_plugins or path.parent == ROOT else {}
        lists = [project.get("dependencies", []), *(extras[name] for name in extras if name not in ("dev", "test"))]
        found |= {text for each in lists for text in each}
    named = {text: Requirement(text).name for text in found}
    return sorted(text for text, name in named.items() if not name.startswith("miles-") and name not in ENGINES)


def pins(text: str) -> dict[str, str]:
    """Return the versions of a lock or constraint file, without hashes, extras and markers."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)(?:\[[\w,-]+\])?==([^\s;\\]+)", text, re.MULTILINE))


def resolve(stack: Stack, constraints: str, directory: Path) -> str:
    """Return the resolved requirements, one per line.

    Raises SystemExit with the reason if there is no solution.
    """
    wanted, bounds = directory / "requirements.in", directory / "constraints.txt"
    wanted.write_text("\n".join([*requirements_of_projects(not stack.locks), *stack.requirements]), encoding="utf-8")
    bounds.write_text(constraints, encoding="utf-8")
    where = ["--python-platform", stack.platform] if stack.platform else ["--universal"]
    command = ["uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header", "--python-version", stack.python]
    command += [*where, "--constraint", str(bounds), "--override", str(ROOT / "docker" / "overrides.txt"), str(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{stack.title}: no solution\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Check or write the files of the stacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stacks", nargs="*", default=list(STACKS), help=f"default: {' '.join(STACKS)}")
    parser.add_argument("--write", action="store_true", help="write the files with the newest versions that fit")
    given = parser.parse_args()
    if shutil.which("uv") is None:
        raise SystemExit("this needs uv: pip install uv")
    for name in given.stacks:
        stack, file = STACKS[name], HERE / f"{name}.txt"
        locked = [f"{key}=={value}\n" for path in stack.locks for key, value in pins((ROOT / path).read_text()).items()]
        with tempfile.TemporaryDirectory() as directory:
            bounds = "".join(locked) if given.write else file.read_text(encoding="utf-8")
            found = resolve(stack, bounds, Path(directory))
        lines = [line for line in found.splitlines() if stack.cuda or not CUDA.match(line)]
        if given.write:
            made = f"# {stack.title}. Written by python constraints/resolve.py --write; pip install -c THIS_FILE ...\n"
            file.write_text(
                made + "\n".join(re.sub(r"\[[\w,-]+\]", "", line) for line in lines) + "\n", encoding="utf-8"
            )
        print(f"{name}: {len(lines)} packages", file=sys.stderr)


if __name__ == "__main__":
    main()
