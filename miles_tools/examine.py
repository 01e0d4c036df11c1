"""What is checked of a run that was accepted, before anything is built. Imports torch only to encode weights in a number format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.plugin.load import announce_import

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.plugin.manifest import Plugin

#: Precision without a number format, as in ``miles_core.precision.schedule``.
_PLAIN = "bf16"


def examine(config: Config, weights: bool, manifests: Mapping[str, Plugin]) -> None:
    """See ``Plugin.examine``: packages and logins of the metric sinks (not for a plan, which may be made on another machine), the weights
    of the checkpoint in the run's number formats, and the address of a remote reward.

    Raises:
        CheckpointError, ConfigError: a weight cannot be stored, or the address cannot be used.
    """
    if weights:
        from miles_tools.sinks import check_sinks

        check_sinks(config.run)
    _examine_formats(config, manifests)
    if config.reward.rm_type == "remote":
        from miles_tools.rewards.remote import RemoteReward

        RemoteReward(config.reward.rm_url)


def _examine_formats(config: Config, manifests: Mapping[str, Plugin]) -> None:
    directory = config.model.hf_checkpoint
    formats = {config.rollout.precision, config.train.precision} - {_PLAIN}
    if directory is None or not formats or not any(Path(directory).glob("*.safetensors")):
        return
    announce_import(
        "torch", f"to check that the weights of {directory} can be stored in {' and '.join(sorted(formats))}"
    )
    from miles_tools.convert import storable

    storable.examine(config, manifests)
