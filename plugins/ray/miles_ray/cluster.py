"""Joins a Ray cluster or starts one on this machine, and checks its resources."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import ray
from ray._private import ray_constants

from miles_core.plugin import ConfigError, Run
from miles_ray.config import RayConfig
from miles_ray.review import START

log = logging.getLogger(__name__)

#: Seconds that the processes of a local cluster survive the loss of the control store (default: 60), long enough to save a checkpoint.
OUTLIVE = 600
#: Prefix of the resource by which Ray names the kind of a machine's GPUs.
KIND = "accelerator_type:"
#: Variables that name the network interface of gloo and NCCL.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Cluster:
    """The cluster of a run.

    Raises:
        ConfigError: the cluster cannot be reached, or has too few resources.
    """

    def __init__(self, run: Run) -> None:
        options: RayConfig = run.config.plugin("ray")
        self.options, self.sizes = options, options.sizes(run.config.run.colocate)
        silent = sum(not policy.generates for policy in run.policies)
        self.policies = len(run.policies)
        self.shared = options.share_policy_gpus
        self.devices = self.sizes.devices * self.policies - (self.sizes.devices - self.sizes.ranks) * silent
        if self.shared:
            self.devices = self.sizes.devices
        self.address = options.address or os.environ.get("RAY_ADDRESS")
        self.own = not ray.is_initialized()
        self.lost = ""  #: why the cluster is unusable; empty if it is usable
        if self.own:
            self._connect()
        self.resources = ray.cluster_resources()
        device = run.config.model.device
        self.unit = "GPU" if device == "cuda" or (device == "auto" and self.resources.get("GPU")) else "CPU"
        self._check()

    @property
    def name(self) -> str:
        """Name of the cluster in messages."""
        return f"the Ray cluster at {self.address}" if self.address else "this machine"

    @property
    def machine(self) -> int:
        """Devices of the largest machine."""
        return int(max((n["Resources"].get(self.unit, 0) for n in ray.nodes() if n["Alive"]), default=1))

    def _connect(self) -> None:
        try:
            with _preserve_handlers(), nullcontext() if self.address else _loopback():
                ray.init(
                    self.address or "local",
                    num_cpus=None if self.address else max(os.cpu_count() or 1, self.devices),
                    include_dashboard=None if self.address else False,
                    log_to_driver=False,  # each process logs to the run's directory
                    logging_level=logging.WARNING,
                    configure_logging=False,
                    _system_config=None if self.address else {"gcs_rpc_server_reconnect_timeout_s": OUTLIVE},
                )
        except Exception as error:  # Ray raises plain Exception if its processes start too slowly
            if not self.address:
                raise ConfigError(f"Ray does not start on this machine: {error}") from error
            origin = "--ray-address" if self.options.address else "RAY_ADDRESS"
            first = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the Ray cluster at {self.address} ({origin}) cannot be joined ({first}): {START}, or leave the address out to start a "
                "cluster on this machine"
            ) from error

    def _check(self) -> None:
        """Raise ConfigError if the cluster has too few GPUs (or CPUs) for the run, or GPUs of several kinds."""
        sizes, have = self.sizes, int(self.resources.get(self.unit, 0))
        kinds = count_gpus(node["Resources"] for node in ray.nodes() if node["Alive"])
        if self.unit == "GPU" and len(kinds) > 1:
            found = " and ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            raise ConfigError(
                f"{self.name} has GPUs of {len(kinds)} kinds, {found}: a run needs one kind, because all ranks and engines wait for the "
                "slowest and must fit the smallest; start Ray on machines of one kind"
            )
        if self.devices > have:
            engines = (
                "on the same ones"
                if sizes.colocate
                else f"and {sizes.engines * sizes.per_engine} for engines (--rollout-num-gpus)"
            )
            who = "this run" if self.policies == 1 or self.shared else f"each of {self.policies} policies"
            raise ConfigError(
                f"{who} takes {sizes.devices} {self.unit}s, {sizes.ranks} to train (--actor-num-nodes {sizes.nodes} x "
                f"--actor-num-gpus-per-node {sizes.per_node}) {engines}, and {self.name} has {have}"
            )

    def leave(self) -> None:
        """Stop a cluster that this run started, or disconnect from one that it joined."""
        if self.own:
            ray.shutdown()

    def abandon(self) -> None:
        """Disconnect from an unresponsive cluster without contacting it, and kill the remaining processes if this run started it."""
        atexit.unregister(ray.shutdown)
        node = ray._private.worker._global_node
        if self.own and node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            _end_session(node.get_session_dir_path())
        _skip_destructors()


def count_gpus(machines: Iterable[Mapping[str, float]]) -> dict[str, int]:
    """Return kind of GPU -> number of GPUs, from the resources of a cluster's machines; Ray names the kind of each machine."""
    found: dict[str, int] = {}
    for resources in machines:
        kind = next((name.removeprefix(KIND) for name in resources if name.startswith(KIND)), None)
        if kind is not None and resources.get("GPU"):
            found[kind] = found.get(kind, 0) + int(resources["GPU"])
    return found


def _skip_destructors() -> None:
    """Exit without running the C++ destructors of Ray, which crash if its processes are gone. The exit status stays as it is.

    Uses ``on_exit(3)`` of glibc; elsewhere the destructors run."""
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit"):
        library.on_exit(library._exit, None)


def _end_session(directory: str) -> None:
    """Kill the remaining processes of a Ray session: agents, and stopped workers."""
    mine = os.getpid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != mine:
            with suppress(OSError):
                if directory.encode() in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)


@contextmanager
def _loopback() -> Iterator[None]:
    """Let a cluster of one machine that starts in this context use the address 127.0.0.1, so that its processes listen on the loopback
    interface. Ray does so on systems without clusters of several machines, and replaces a given address 127.0.0.1 elsewhere. Workers
    inherit the variables that restrict their process groups to this interface, unless the user has chosen another one."""
    plain = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    unset = [name for name in INTERFACES if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, "lo0" if sys.platform == "darwin" else "lo"))
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = plain
        for name in unset:
            del os.environ[name]


@contextmanager
def _preserve_handlers() -> Iterator[None]:
    """Keep the signal handlers while Ray starts: a run must end at a completed step. Ray's handler of SIGTERM calls ``sys.exit``, whose
    SystemExit the interrupted code may drop, and the signal with it."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    install = ray._private.utils.set_sigterm_handler
    ray._private.utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = install
        for number, handler in kept.items():
            if handler is not None:  # None: the handler was not installed from Python
                signal.signal(number, handler)
