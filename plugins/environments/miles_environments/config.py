"""Options of the environments plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from miles_core.plugin import option

#: Condition of options about episodes, and about programs that run in a sandbox.
_EPISODES = "rollout.generate == environments or rollout.generate_key"
_PROGRAMS = "reward.rm_type == unit_tests"


@dataclass(frozen=True, kw_only=True)
class EnvironmentsConfig:
    """Prompts, episodes and rewards from environment libraries."""

    mix: tuple[Any, ...] = option(
        (),
        flag="--environments",
        help="environments to train on: LIBRARY:TASK?weight=2&key=value; a table with name and task in a file",
        metavar="LIBRARY:TASK,...",
        enables=True,
    )
    held_out: tuple[Any, ...] = option(
        (),
        flag="--eval-environments",
        help="environments of --eval-prompts environments (default: those of --environments, other tasks)",
        metavar="LIBRARY:TASK,...",
        only_if="evaluation.prompts",
    )
    held_out_size: int = option(
        64, flag="--eval-environments-size", help="tasks per evaluation data set", ge=1, only_if="evaluation.prompts"
    )
    turns: int = option(
        16, flag="--environment-turns", help="answers of the model per episode", ge=1, only_if=_EPISODES
    )
    seconds: float = option(
        60.0, flag="--environment-seconds", help="time limit of one step of an environment, or of one score", gt=0
    )
    concurrency: int = option(64, flag="--environment-concurrency", help="concurrent calls of environments", ge=1)
    chars: int = option(
        8192,
        flag="--environment-chars",
        help="characters of an observation that the model receives",
        ge=1,
        only_if=_EPISODES,
    )
    sandbox: str = option(
        "local",
        flag="--sandbox",
        help="where unit tests run: local, docker, or a third party's module:Class",
        metavar="NAME",
        only_if=_PROGRAMS,
    )
    sandbox_image: str = option(
        "python:3.11-slim",
        flag="--sandbox-image",
        help="image of --sandbox docker",
        metavar="IMAGE",
        only_if="environments.sandbox == docker",
    )
    sandbox_seconds: float = option(
        10.0, flag="--sandbox-seconds", help="time limit of a program in a sandbox", gt=0, only_if=_PROGRAMS
    )
    sandbox_memory_mb: int = option(
        1024, flag="--sandbox-memory-mb", help="memory of a program in a sandbox, in MiB", ge=16, only_if=_PROGRAMS
    )
    sandbox_network: Literal["none", "host"] = option(
        "none", flag="--sandbox-network", help="network of --sandbox docker", only_if="environments.sandbox == docker"
    )
