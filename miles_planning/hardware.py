"""The hardware that a plan is for."""

from __future__ import annotations

from collections.abc import Sequence

from miles_core.plugin import ConfigError


def check_hardware(argv: Sequence[str]) -> None:
    """Refuse a cluster of several kinds of GPUs, for example ``8xH100,8xH200`` or ``8xH100+8xH200``."""
    words = [*argv, ""]
    given = [
        words[i + 1] if word == "--hardware" else word for i, word in enumerate(argv) if word.startswith("--hardware")
    ]
    for word in given:
        hardware = word.removeprefix("--hardware=")
        if any(mark in hardware for mark in ",+;"):
            raise ConfigError(
                f"--hardware {hardware}: a run needs GPUs of one kind, because all ranks and engines wait for the slowest and must fit "
                "the smallest; plan for one kind, or for the weakest with the number of all"
            )
