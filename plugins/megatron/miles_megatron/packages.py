"""The packages this trainer needs, and the versions it was tested with. Imports neither of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

#: Distribution -> tested versions.
CORE = ("megatron-core", ">=0.19.2,<0.20")
ENGINE = ("transformer-engine", ">=2.20,<2.21")


def missing(gpu: bool) -> Iterator[tuple[str, str]]:
    """(what is needed, why it is not met) for each package.

    Args:
        gpu: the model is on a GPU, where its modules are TransformerEngine's.
    """
    for name, wanted in (CORE, ENGINE) if gpu else (CORE,):
        try:
            found = version(name)
        except PackageNotFoundError:
            extra = (
                ""
                if sys.version_info >= (3, 12) or name != CORE[0]
                else "; it needs Python 3.12, and this is " + _python()
            )
            yield f"{name} {wanted}", f'it is not installed: pip install "{name}{wanted}"{extra}'
            continue
        if found not in SpecifierSet(wanted):
            yield (
                f"{name} {wanted}",
                f'{found} is installed, which it was not tested with: pip install "{name}{wanted}"',
            )


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
