"""Joining a cluster, or starting one on this machine; what it has, and what a run takes of it."""

from __future__ import annotations

import logging
import os
import socket

import ray

from miles_core import ConfigError
from miles_core.backend import Run
from miles_ray.config import RayConfig

log = logging.getLogger(__name__)

START = "start one with: ray start --head"
#: Seconds in which a cluster must answer.
PATIENCE = 10.0


class Cluster:
    """The cluster of a run.

    Raises:
        ConfigError: it cannot be reached.
    """

    def __init__(self, run: Run) -> None:
        options: RayConfig = run.config.plugin("ray")
        self.options = options
        self._check_options()
        self.address = options.address or os.environ.get("RAY_ADDRESS")
        self.own = not ray.is_initialized()
        if self.own:
            self._connect(options)
        self.resources = ray.cluster_resources()
        device = run.config.model.device
        self.unit = "GPU" if device == "cuda" or (device == "auto" and self.resources.get("GPU")) else "CPU"
        self._check()

    @property
    def name(self) -> str:
        """For messages."""
        return f"the Ray cluster at {self.address}" if self.address else "this machine"

    def _connect(self, options: RayConfig) -> None:
        wanted = options.ranks + options.rollout_num_gpus
        try:
            _answers(self.address)
            ray.init(
                self.address or "local",
                num_cpus=None if self.address else max(os.cpu_count() or 1, wanted),
                include_dashboard=None if self.address else False,
                log_to_driver=False,  # every process writes into the run's directory
                logging_level=logging.WARNING,
                configure_logging=False,
            )
        except (OSError, ValueError, RuntimeError) as error:
            origin = "--ray-address" if options.address else "RAY_ADDRESS"
            if not self.address:
                raise ConfigError(f"Ray does not start on this machine: {error}") from error
            raise ConfigError(
                f"no Ray cluster answers at {self.address} ({origin}): {START}, or leave the address out for a cluster of "
                "this machine alone"
            ) from error

    def _check_options(self) -> None:
        options = self.options
        if options.rollout_num_gpus % options.rollout_num_gpus_per_engine:
            raise ConfigError(
                f"--rollout-num-gpus {options.rollout_num_gpus} are not whole engines of --rollout-num-gpus-per-engine "
                f"{options.rollout_num_gpus_per_engine}"
            )

    def _check(self) -> None:
        """Enough GPUs (or CPUs) for what was asked."""
        options = self.options
        wanted = options.ranks + options.rollout_num_gpus
        have = int(self.resources.get(self.unit, 0))
        if wanted > have:
            raise ConfigError(
                f"this run takes {wanted} {self.unit}s, {options.ranks} to train (--actor-num-nodes {options.actor_num_nodes} x "
                f"--actor-num-gpus-per-node {options.actor_num_gpus_per_node}) and {options.rollout_num_gpus} for engines "
                f"(--rollout-num-gpus), and {self.name} has {have}"
            )

    def leave(self) -> None:
        """End a cluster that was started here, leave one that was joined."""
        if self.own:
            ray.shutdown()


def _answers(address: str | None) -> None:
    """OSError where nobody listens at HOST:PORT, which Ray itself finds out after minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
