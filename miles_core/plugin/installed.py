"""Facts ``package.NAME`` about installed packages. A plan for other machines assumes that missing packages exist there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from miles_core.plugin.facts import PACKAGE, Fact
from miles_core.plugin.manifest import Package, Plugin

#: Value of the fact of a package that a plan for other machines assumes to be installed there.
ASSUMED = "assumed"


def package_facts(manifests: Iterable[Plugin], elsewhere: bool) -> Iterator[Fact]:
    """Yield one fact for each package that a manifest needs.

    Args:
        elsewhere: whether the plan is for other machines, so that a package missing here is assumed to exist there.
    """
    for package in {package.name: package for plugin in manifests for package in plugin.packages}.values():
        yield package_fact(package, elsewhere)


def package_fact(package: Package, elsewhere: bool) -> Fact:
    """Return the fact of one package: its installed version, ``none``, or ``assumed``."""
    try:
        installed, origin = version(package.name), "installed here"
    except PackageNotFoundError:
        installed, origin = "none", "not installed here"
    if elsewhere and not package.fits(installed):
        here = f"{installed} is installed here" if installed != "none" else origin
        return Fact(f"{PACKAGE}.{package.name}", ASSUMED, f"the plan is for other machines; {here}")
    return Fact(f"{PACKAGE}.{package.name}", installed, origin)
