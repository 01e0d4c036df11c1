"""Checks of an accepted run before anything is built. Imports torch only to encode weights in a number format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.errors import CheckpointError
from miles_core.plugin.detect import model_facts
from miles_core.plugin.load import announce_import

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.plugin.manifest import Plugin

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
#: Precision without a number format, as in ``miles_core.precision.schedule``.
_PLAIN = "bf16"


def examine(config: Config, manifests: Mapping[str, Plugin], weights: bool) -> None:
    """See ``Plugin.examine``: the headers of the weights, the weights in the run's number formats, the address of a remote reward, and the
    recorded steps to train on.

    Raises:
        CheckpointError, ConfigError: a weight cannot be stored, or the address cannot be used.
        MilesError: the recorded steps cannot be read.
    """
    _examine_layers(config)
    _examine_formats(config, manifests)
    if config.reward.rm_type == "remote":
        from miles_tools.rewards.remote import RemoteReward

        RemoteReward(config.reward.rm_url)
    if weights and config.plugin("replay").debug_train_only:
        from miles_tools.replay.open_run import open_source

        open_source(config.plugin("replay"))


def _examine_layers(config: Config) -> None:
    """Raise CheckpointError if weight files are missing or incomplete, or hold more layers than config.json declares. Additional
    layers would silently be neither trained nor exported."""
    flag = "--ref-load" if config.model.ref_load else "--hf-checkpoint"
    directory = Path(config.model.ref_load or config.model.hf_checkpoint or "")
    if not config.model.hf_checkpoint or not any(directory.glob("*.safetensors*")):
        return  # no directory, or weights in another file format: the backend checks these
    facts = {fact.name: fact.value for fact in model_facts(config.model.hf_checkpoint)}
    declared = facts["model.layers"]
    held = {int(match[1]) for name in CheckpointFiles(directory, flag).entries if (match := _LAYER.search(name))}
    if declared is not None and held and max(held) + 1 > int(declared) + int(facts["model.mtp_layers"] or 0):
        raise CheckpointError(
            f"{flag} {directory}: config.json declares {declared} layers but the weights hold {max(held) + 1}; the others would "
            "not be trained or exported: correct the number in config.json"
        )


def _examine_formats(config: Config, manifests: Mapping[str, Plugin]) -> None:
    directory = config.model.hf_checkpoint
    formats = {config.rollout.precision, config.train.precision} - {_PLAIN}
    if directory is None or not formats or not any(Path(directory).glob("*.safetensors")):
        return
    announce_import(
        "torch", f"to check that the weights of {directory} can be stored in {' and '.join(sorted(formats))}"
    )
    from miles_formats.convert import storable

    storable.examine(config, manifests)
