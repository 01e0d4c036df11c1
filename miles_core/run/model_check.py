"""Checks of the model that a run names, from ``config.json`` and the headers of its weights. Imports no torch: a plan must be quick."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.config.config import Config
from miles_core.errors import CheckpointError
from miles_core.plugin.activate import provider
from miles_core.plugin.load import import_target, select_arguments
from miles_core.plugin.manifest import Plugin
from miles_core.plugin.plan import Plan

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def check_model(config: Config, plan: Plan, manifests: Mapping[str, Plugin], weights: bool) -> None:
    """Check the headers of the weight files, and run the ``examine`` functions of the plugins that build or standardise models.

    Args:
        weights: require the weight files to exist.

    Raises:
        CheckpointError, ConfigError: the weights are missing, incomplete or unsupported.
    """
    _check_weights(config, plan)
    standard = [plugin for plugin in manifests.values() if plugin.standard]
    for plugin in [*_builders(plan, manifests), *standard]:
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


def _check_weights(config: Config, plan: Plan) -> None:
    """Raise CheckpointError if weight files are missing or incomplete, or hold more layers than config.json declares. Additional
    layers would silently be neither trained nor exported."""
    directory = Path(config.model.ref_load or config.model.hf_checkpoint or "")
    if not config.model.hf_checkpoint or not any(directory.glob("*.safetensors*")):
        return  # no directory, or weights in another file format: the backend checks these
    flag = "--ref-load" if config.model.ref_load else "--hf-checkpoint"
    files = CheckpointFiles(directory, flag)
    held = {int(match[1]) for name in files.entries if (match := _LAYER.search(name))}
    declared = plan.fact("model.layers")
    if declared is not None and held and max(held) + 1 > int(declared) + int(plan.fact("model.mtp_layers") or 0):
        raise CheckpointError(
            f"{flag} {directory}: config.json declares {declared} layers but the weights hold {max(held) + 1}; the others would "
            "not be trained or exported: correct the number in config.json"
        )
