"""The table of GPU rates and measured efficiencies, ``rates.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from miles_core.plugin import ConfigError


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU.

    Attributes:
        name: name as in ``--hardware``.
        bf16, fp8: dense operations per second; ``fp8`` is 0 without such tensor cores.
        memory: bytes per second of the GPU's memory.
        nvlink, network: bytes per second and direction within a machine and between machines.
        host: bytes per second between GPU and host memory.
        launch: factor of the fixed times of training layers.
    """

    name: str
    bf16: float
    fp8: float
    memory: float
    nvlink: float
    network: float
    host: float
    launch: float = 1.0


@dataclass(frozen=True)
class Rates:
    """A GPU, and the fractions of its rates that runs reach.

    Attributes:
        gpu: the GPU.
        efficiency: name -> fraction of a peak rate.
        seconds: name -> seconds that do not depend on the amount of data.
        sync: the row ``sync`` of the table: ``rate``, ``colocated_rate`` and ``copy_rate`` in bytes per second, ``fixed`` in seconds.
        machine: GPUs per machine.
    """

    gpu: Gpu
    efficiency: Mapping[str, float]
    seconds: Mapping[str, float]
    sync: Mapping[str, float]
    machine: int = 8

    def link(self, ranks: int) -> float:
        """Bytes per second between ``ranks`` neighbouring GPUs: NVLink within a machine, else the network."""
        return self.gpu.nvlink if ranks <= self.machine else self.gpu.network


@cache
def _table() -> dict[str, dict[str, dict[str, float]]]:
    return tomllib.loads(files("miles_planner").joinpath("rates.toml").read_text(encoding="utf-8"))


def known_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs in the table."""
    return tuple(_table()["gpu"])


def rates_of(gpu: str, machine: int = 8) -> Rates:
    """Return the rates for a GPU.

    Args:
        gpu: name as in ``--hardware``.
        machine: GPUs per machine.

    Raises:
        ConfigError: the table has no row for this GPU.
    """
    table = _table()
    row = table["gpu"].get(gpu)
    if row is None:
        raise ConfigError(
            f"rates.toml of the planner has no rates for the GPU {gpu}, so its time cannot be estimated; it has {', '.join(known_gpus())}"
        )
    units = {"bf16": 1e12, "fp8": 1e12, "memory": 1e12, "nvlink": 1e9, "network": 1e9, "host": 1e9}
    sync: dict[str, float] = table["sync"]  # type: ignore[assignment]
    return Rates(
        Gpu(gpu, **{name: row[name] * unit for name, unit in units.items()}, launch=row.get("launch", 1.0)),
        {name: entry["value"] for name, entry in table["efficiency"].items()},
        {name: entry["value"] for name, entry in table["seconds"].items()},
        {"fixed": sync["fixed"], **{name: sync[name] * 1e9 for name in ("rate", "colocated_rate", "copy_rate")}},
        machine,
    )
