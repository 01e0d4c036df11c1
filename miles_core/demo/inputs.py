"""What the demonstration trains on, and the command line that trains on it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from miles_core.demo.task import write_task
from miles_core.errors import ConfigError

CONFIG = Path(__file__).with_name("demo.yaml")
#: The demonstration shows these when they are installed.
PLUGINS = ("r3", "tis")


def make_inputs(directory: Path, seed: int) -> int:
    """Write ``model/`` and ``data/`` into ``directory``; returns the number of parameters.

    Raises ConfigError when the directory already holds a run or cannot be written.
    """
    from miles_core.demo.model import make_checkpoint

    if (directory / "metrics.jsonl").exists() or (directory / "checkpoints").is_dir():
        raise ConfigError(f"--dir {directory} already holds a run; choose another directory, or remove this one")
    try:
        write_task(directory / "data", seed)
        return make_checkpoint(directory / "model", seed)
    except OSError as error:
        raise ConfigError(f"--dir {directory}: cannot write the demo's model and data there ({error})") from error


def train_arguments(directory: Path, seed: int, installed: Collection[str], extra: Sequence[str] = ()) -> list[str]:
    """The flags of ``miles train`` for the demonstration; ``extra`` flags come last."""
    data = directory / "data"
    arguments = ["--config", str(CONFIG), "--hf-checkpoint", str(directory / "model"), "--save", str(directory)]
    arguments += ["--sft-data", str(data / "demonstrations.jsonl"), "--prompt-data", str(data / "train.jsonl")]
    arguments += ["--eval-prompt-data", str(data / "held_out.jsonl"), "--seed", str(seed)]
    plugins = [name for name in PLUGINS if name in installed]
    if plugins and not any(word.split("=")[0] == "--plugins" for word in extra):
        arguments += ["--plugins", ",".join(plugins)]
    return [*arguments, *extra]


def missing(installed: Collection[str]) -> list[str]:
    """The plugins the demonstration has to do without."""
    return [name for name in PLUGINS if name not in installed]
