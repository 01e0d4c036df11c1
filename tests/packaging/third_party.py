"""Print what plugins and examples need from the package index, apart from miles-core and the production engines.

    python tests/packaging/third_party.py plugins/ray examples/normalized_reward

``make install`` installs these requirements, then the distributions with ``--no-deps``: a checkout needs no CUDA.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

#: Distributions that bring CUDA, each needed by one plugin; ``make engines`` installs what of them runs on a CPU.
ENGINES = frozenset({"sglang", "megatron-core", "transformer-engine"})


def requirements(project: Path) -> list[Requirement]:
    """The dependencies that ``project/pyproject.toml`` declares."""
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in declared.get("dependencies", ())]


def third_party(projects: Iterable[Path]) -> list[str]:
    """Requirements of ``projects``, sorted, without their own distributions and without ``ENGINES``."""
    found = (r for project in projects for r in requirements(project))
    return sorted({str(r) for r in found if not r.name.startswith("miles-") and r.name not in ENGINES})


if __name__ == "__main__":
    print("\n".join(third_party(map(Path, sys.argv[1:]))))
