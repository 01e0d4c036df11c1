"""A run as a cluster's scheduler sees it: machines, GPUs, an image, and the command of the driver."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from miles_core.plugin import ConfigError

#: Port of the run's Ray cluster.
PORT = 6379
#: Seconds in which all machines must have joined.
JOIN_SECONDS = 600


@dataclass(frozen=True)
class Job:
    """The job that a launch file starts.

    Attributes:
        name: name of the job: lower-case letters, digits and dashes.
        machines: number of machines.
        gpus: GPUs per machine.
        gpu: type of the GPUs, as in ``--hardware``.
        command: the driver's command line.
        header: the plan's first line, for a comment.
        image: container image; empty to use what is installed on the machines.
        shared: directory that all machines share.
        hours: time limit.
        stop_within: seconds that the driver needs to stop (``--stop-within``).
    """

    name: str
    machines: int
    gpus: int
    gpu: str
    command: tuple[str, ...]
    header: str
    image: str = ""
    shared: str = "/shared"
    hours: int = 24
    stop_within: float = 20.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?", self.name):
            raise ConfigError(f"--name {self.name}: use at most 47 lower-case letters, digits and dashes")
        if not self.shared.startswith("/"):
            raise ConfigError(f"--shared {self.shared}: give an absolute path, because it is the same on every machine")
        if self.hours < 1:
            raise ConfigError(f"--hours {self.hours}: a job needs at least one hour")

    @property
    def command_line(self) -> str:
        """The driver's command, quoted for a shell."""
        return shlex.join(self.command)

    def wait_for_machines(self) -> str:
        """Return Python code that ends once all machines have joined the Ray cluster of this machine."""
        return (
            "import ray, sys, time\n"
            'ray.init(address="auto", log_to_driver=False)\n'
            f"end = time.time() + {JOIN_SECONDS}\n"
            'alive = lambda: sum(node["Alive"] for node in ray.nodes())\n'
            f"while alive() < {self.machines} and time.time() < end: time.sleep(2)\n"
            f"if alive() < {self.machines}:\n"
            f'    sys.exit(f"only {{alive()}} of {self.machines} machines have joined within {JOIN_SECONDS} seconds")\n'
        )
