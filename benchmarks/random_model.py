"""Random checkpoints of a size, made in BF16 on the device that will use them: on a GPU in a second, where a CPU takes half a minute."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

CODE = """
import torch
from miles_testing import tiny_checkpoint
torch.set_default_device({device!r})
tiny_checkpoint({family!r}, {directory!r}, dtype="bfloat16", **{sizes!r})
"""


def make_checkpoint(family: str, directory: Path, sizes: Mapping[str, Any], device: str = "cpu") -> int:
    """Save a random BF16 model; returns its number of parameters. A process of its own makes it, so that this one holds no memory for it.

    Args:
        family: a family of ``miles_testing.tiny``.
        directory: target directory.
        sizes: entries of the configuration.
        device: device of the computation.
    """
    code = CODE.format(device=device, family=family, directory=str(directory), sizes=dict(sizes))
    subprocess.run([sys.executable, "-c", code], check=True)
    count = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no mapping
    return count
