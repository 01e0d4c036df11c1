"""GPUs by name: peak rates from the manufacturer's data sheets, dense (without sparsity)."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        bandwidth: of its memory, bytes per second.
        flops: BF16 products on tensor cores, operations per second.
        memory: bytes.
        linked: GPUs that NVLink connects.
    """

    bandwidth: float
    flops: float
    memory: float
    linked: int = 8


GPUS = {
    "A100": Gpu(2.0e12, 312e12, 80e9),
    "H20": Gpu(4.0e12, 148e12, 96e9),
    "H100": Gpu(3.35e12, 989e12, 80e9),
    "H800": Gpu(3.35e12, 989e12, 80e9),
    "H200": Gpu(4.8e12, 989e12, 141e9),
    "B200": Gpu(8.0e12, 2250e12, 180e9),
    "GB200": Gpu(8.0e12, 2500e12, 186e9, linked=72),
}


def find_gpu(name: str) -> Gpu:
    """Return the GPU of a name. Raises ConfigError with the known names if there is none."""
    if name.upper() not in GPUS:
        raise ConfigError(f"--gpu {name}: its rates are unknown; known are {', '.join(GPUS)}")
    return GPUS[name.upper()]
