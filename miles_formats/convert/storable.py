"""Checks before a run starts that its number formats can store the weights of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.config.config import Config
from miles_core.plugin.manifest import Plugin
from miles_core.precision.schedule import PLAIN
from miles_formats.convert.encode import to_format
from miles_formats.convert.installed import format_class
from miles_formats.convert.json_files import quantization_block
from miles_formats.options import codec_for


def examine(config: Config, manifests: Mapping[str, Plugin]) -> None:
    """Plan the conversion of ``--hf-checkpoint`` into each number format of the run, from headers alone.

    Skips quantised checkpoints, which the backend checks when it reads them.

    Raises:
        CheckpointError, ConfigError: a weight cannot be stored in a format; names both.
    """
    directory = Path(config.model.hf_checkpoint or "")
    if not config.model.hf_checkpoint or not any(directory.glob("*.safetensors")):
        return
    files = CheckpointFiles(directory, "--hf-checkpoint")
    if quantization_block(directory, files.config) is not None:
        return
    for name in dict.fromkeys((config.rollout.precision, config.train.precision)):
        if name != PLAIN:
            to_format(files, codec_for(format_class(name, manifests), config, str(directory)))
