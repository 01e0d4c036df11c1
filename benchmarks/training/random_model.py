"""Random checkpoints of a size, made in BF16 on the device that will use them: on a GPU in a second, where a CPU takes half a minute."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.training.forked import in_fork


def import_family(family: str) -> None:
    """Import Transformers' model and the embedded trainer, so that forked processes find them imported."""
    import transformers

    import miles_core.launch  # noqa: F401
    import miles_embedded.engine.engine
    import miles_embedded.trainer.trainer  # noqa: F401
    from miles_testing.tiny import FAMILIES

    getattr(transformers, FAMILIES[family][0].replace("Config", "ForCausalLM"))


def make_checkpoint(family: str, directory: Path, sizes: Mapping[str, Any], device: str = "cpu") -> int:
    """Save a random BF16 model; returns its number of parameters. A process of its own makes it, so that this one holds no memory for it.

    Args:
        family: a family of ``miles_testing.tiny``.
        directory: target directory.
        sizes: entries of the configuration.
        device: device of the computation.
    """

    def make() -> int:
        import torch

        from miles_testing import tiny_checkpoint

        torch.set_default_device(device)
        tiny_checkpoint(family, directory, dtype="bfloat16", **sizes)
        return _count(directory)

    count = in_fork(make)
    if isinstance(count, dict):
        raise SystemExit(f"no {family} was made of {dict(sizes)}; see above")
    return int(count)


def _count(directory: Path) -> int:
    from safetensors import safe_open

    count = 0
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no mapping
    return count
