"""GPUs by name, from the table of ``miles plan --search``."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.errors import ConfigError
from miles_core.plugin.detect import KNOWN_GPUS
from miles_planner.rates import known_gpus, rates_of

#: GPUs per NVLink domain, for GPUs whose domain spans several machines.
LINKED = {"GB200": 72, "GB300": 72}


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        bandwidth: of its memory, bytes per second.
        flops: BF16 products on tensor cores, operations per second.
        memory: bytes.
        linked: GPUs per NVLink domain.
    """

    bandwidth: float
    flops: float
    memory: float
    linked: int = 8


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name. Raises ConfigError with the known names if there is none."""
    found = next((known for known in known_gpus() if known.upper() == name.upper()), None)
    if found is None:
        raise ConfigError(f"--gpu {name}: its rates are unknown; choose one of {', '.join(known_gpus())}")
    rates, (_, memory) = rates_of(found).gpu, KNOWN_GPUS[found]
    return Gpu(rates.memory, rates.bf16, memory * 1e9, LINKED.get(found, 8))
