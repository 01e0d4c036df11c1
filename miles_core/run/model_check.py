"""Runs the plugins' checks of a run's model. Does not import torch, so that a plan stays fast."""

from __future__ import annotations

from collections.abc import Mapping

from miles_core.config.config import Config
from miles_core.plugin.activate import provider
from miles_core.plugin.load import import_target, select_arguments
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan


def check_model(config: Config, plan: Plan, manifests: Mapping[str, Plugin], weights: bool) -> None:
    """Run the ``examine`` functions of the plugins that build models or belong to every run.

    Args:
        weights: require the weight files to exist.

    Raises:
        CheckpointError, ConfigError: the weights are missing, incomplete or unsupported.
    """
    standard = [plugin for plugin in manifests.values() if plugin.standard]
    for plugin in [*standard, *_builders(plan, manifests)]:
        if plugin.examine:
            examine = import_target(plugin.name, plugin.examine)
            examine(**select_arguments(examine, {"config": config, "weights": weights, "manifests": manifests}))


def _builders(plan: Plan, manifests: Mapping[str, Plugin]) -> list[Plugin]:
    """Return the plugins that build models from the checkpoint: the provider of ``model``, and the trainer's plugin if it builds its
    own model."""
    models = next((p for name in plan.order if (p := manifests[name]).provides.get("model")), None)
    trains = provider("trainer", plan.fact("trainer"), manifests)
    own = trains if trains is not None and not trains.provides.get("model") else None
    return [p for p in (models, own) if p is not None]
