"""Which SGLang is installed here, asked without importing it."""

from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet

from miles_core import Rule

#: The versions this plugin was tested with.
TESTED = ">=0.5.17,<0.5.18"
INSTALL = f"pip install 'sglang{TESTED}'"


def version() -> str | None:
    """The version of the installed SGLang; None where there is none."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def missing(found: str | None = "") -> tuple[Rule, ...]:
    """The rule that a run without a usable SGLang breaks: only a server elsewhere would do. Empty where one is installed.

    Args:
        found: the version to judge; by default the one installed here.
    """
    found = version() if found == "" else found
    if found is not None and SpecifierSet(TESTED).contains(found, prereleases=True):
        return ()
    here = f"SGLang {found} is installed here" if found else "SGLang is not installed here"
    because = (
        f"{here} and this plugin was tested with sglang{TESTED}: {INSTALL}; or give --sglang-url of a running server"
    )
    return (Rule(needs="sglang.url", because=because),)
