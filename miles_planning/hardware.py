"""The hardware that a plan is for."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.plugin import ConfigError


def check_hardware(argv: Sequence[str]) -> None:
    """Refuse no hardware, and a cluster of several kinds of GPUs, for example ``8xH100,8xH200``, ``8xH100+8xH200`` or two
    options."""
    words = [*argv, ""]
    given = [words[i + 1] for i, word in enumerate(argv) if word == "--hardware"]
    given += [word.partition("=")[2] for word in argv if word.startswith("--hardware=")]
    kinds = list(dict.fromkeys(given))
    if "" in kinds:
        raise ConfigError("--hardware is empty: give machines, GPUs and their type, for example 2x8xH200")
    if len(kinds) > 1 or any(mark in hardware for hardware in kinds for mark in ",+;& "):
        raise ConfigError(
            f"--hardware {' and '.join(kinds)}: a run needs GPUs of one kind, because all ranks and engines wait for the slowest and must "
            "fit the smallest; plan for one kind, or for the weakest with the number of all"
        )
