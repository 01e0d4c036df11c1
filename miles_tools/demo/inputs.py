"""Creates the demo's model and data, and its command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError
from miles_tools.demo.task import write_task

if TYPE_CHECKING:
    from miles_core.plugin.manifest import Plugin

CONFIG, GPU_CONFIG = (Path(__file__).with_name(name) for name in ("demo.yaml", "gpu.yaml"))


def make_inputs(directory: Path, seed: int, gpu: bool = False) -> int:
    """Write ``model/`` and ``data/`` into ``directory``; returns the number of parameters. ``gpu``: the model's shape for a GPU.

    Raises ConfigError if the directory already contains a run or is not writable.
    """
    from miles_tools.demo.model import ON_A_GPU, make_checkpoint

    if (directory / "metrics.jsonl").exists() or (directory / "checkpoints").is_dir():
        raise ConfigError(f"--dir {directory} already holds a run; choose another directory, or remove this one")
    try:
        write_task(directory / "data", seed)
        return make_checkpoint(directory / "model", seed, ON_A_GPU if gpu else None)
    except OSError as error:
        raise ConfigError(f"--dir {directory}: cannot write the demo's model and data there ({error})") from error


def train_arguments(
    directory: Path, seed: int, plugins: Sequence[str], extra: Sequence[str] = (), gpu: bool = False
) -> list[str]:
    """Return the flags of ``miles train`` for the demo with these plugins; ``extra`` flags come last. ``gpu``: sizes for a GPU."""
    data = directory / "data"
    arguments = ["--config", str(CONFIG), *(["--config", str(GPU_CONFIG)] if gpu else [])]
    arguments += ["--hf-checkpoint", str(directory / "model"), "--save", str(directory)]
    arguments += ["--sft-data", str(data / "demonstrations.jsonl"), "--prompt-data", str(data / "train.jsonl")]
    arguments += ["--eval-prompt-data", str(data / "held_out.jsonl"), "--seed", str(seed)]
    if plugins and not any(word.split("=")[0] == "--plugins" for word in extra):
        arguments += ["--plugins", ",".join(plugins)]
    return [*arguments, *extra]


def plugins_shown(installed: Mapping[str, Plugin]) -> list[str]:
    """Return the installed plugins that the demo uses: those with ``Plugin.demo`` in their manifest."""
    return [name for name, manifest in installed.items() if manifest.demo]
