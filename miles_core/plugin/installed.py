"""Which software is installed here, as facts ``package.NAME``; where a plan is for other machines, it is assumed there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from miles_core.plugin.facts import PACKAGE, Fact
from miles_core.plugin.manifest import Package, Plugin

#: Value of the fact of a package that a plan for other machines takes for granted.
ASSUMED = "assumed"


def package_facts(manifests: Iterable[Plugin], elsewhere: bool) -> Iterator[Fact]:
    """One fact for each package that some manifest needs.

    Args:
        elsewhere: the plan is for other machines, so a package that is missing here is assumed there.
    """
    for package in {package.name: package for plugin in manifests for package in plugin.packages}.values():
        yield installed(package, elsewhere)


def installed(package: Package, elsewhere: bool) -> Fact:
    """The installed version, ``none``, or ``assumed``."""
    try:
        found, origin = version(package.name), "installed here"
    except PackageNotFoundError:
        found, origin = "none", "not installed here"
    if elsewhere and not package.fits(found):
        here = f"{found} is installed here" if found != "none" else origin
        return Fact(f"{PACKAGE}.{package.name}", ASSUMED, f"the plan is for other machines; {here}")
    return Fact(f"{PACKAGE}.{package.name}", found, origin)
