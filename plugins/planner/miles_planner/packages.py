"""The plugin packages that a plan needs: those of its runtime, engine and trainer, without their dependencies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from miles_core.plugin import ConfigError

#: Options that name a part, and the parts that a search chooses if they are not set. Each is a plugin of the same name.
PARTS: Mapping[str, str] = {"--runtime": "ray", "--engine": "sglang", "--trainer": "megatron"}


def read_option(argv: Sequence[str], flag: str) -> str | None:
    """Return the last value of an option on the command line, None without it."""
    found = None
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def check_packages(argv: Sequence[str], searched: bool = False) -> None:
    """Refuse parts whose plugin is not installed, with one command that installs all of them.

    Args:
        argv: options of a run.
        searched: whether parts that are not set are those of a search.

    Raises:
        ConfigError: a plugin is not installed.
    """
    wanted = {flag: read_option(argv, flag) or (part if searched else None) for flag, part in PARTS.items()}
    installed = {point.name for point in entry_points(group="miles.plugins")}
    missing = {flag: part for flag, part in wanted.items() if part in set(PARTS.values()) - installed}
    if not missing:
        return
    options = ", ".join(f"{flag} {part}" for flag, part in missing.items())
    packages = " ".join(_package(str(part)) for part in missing.values())
    raise ConfigError(
        f"{options}: not installed here. A plan needs these small plugins, but neither Ray, SGLang and Megatron-Core nor a GPU: "
        f"pip install --no-deps {packages}"
    )


def _package(part: str) -> str:
    """Return what pip installs: the folder in a checkout, otherwise the name of the distribution."""
    folder = Path(__file__).parents[2] / part
    if not (folder / "pyproject.toml").is_file():
        return f"miles-plugin-{part}"
    relative = os.path.relpath(folder)
    return str(folder) if relative.startswith("..") else f".{os.sep}{relative}"
