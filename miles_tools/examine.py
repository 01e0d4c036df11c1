"""What is checked of a run that was accepted, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

from miles_core.config.config import Config
from miles_core.plugin.manifest import Plugin
from miles_tools.convert import storable
from miles_tools.rewards.remote import RemoteReward
from miles_tools.sinks import check_sinks


def examine(config: Config, weights: bool, manifests: Mapping[str, Plugin]) -> None:
    """See ``Plugin.examine``: packages and logins of the metric sinks (not for a plan, which may be made on another machine), the weights
    of the checkpoint in the run's number formats, and the address of a remote reward.

    Raises:
        CheckpointError, ConfigError: a weight cannot be stored, or the address cannot be used.
    """
    if weights:
        check_sinks(config.run)
    storable.examine(config, manifests)
    if config.reward.rm_type == "remote":
        RemoteReward(config.reward.rm_url)
