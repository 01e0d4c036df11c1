"""Checks of a plan that need the checkpoint. Imports no torch if the model's family and the targets are known without its code."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from miles_embedded import find_known_weights


def examine(config: Any, weights: bool) -> None:
    """See ``miles_core.plugin.Plugin.examine``.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: a target matches nothing, or conflicts with another option.
    """
    if not weights and "torch" not in sys.modules and _is_known(config):
        return
    from miles_lora.examine_model import examine as examine_model

    examine_model(config, weights)


def _is_known(config: Any) -> bool:
    """Whether all targets are linear layers of a known dense model, so that no check can fail."""
    options, path = config.plugin("lora"), config.model.ref_load or config.model.hf_checkpoint
    if path is None or options.adapter is not None or not Path(path).is_dir():
        return False
    known = find_known_weights(path)
    if known is None or any(".experts." in name for name in known):
        return False
    return selects_layers(known, options.target_modules)


def selects_layers(weights: Iterable[str], names: Sequence[str]) -> bool:
    """Whether each of ``names`` (``--lora-target-modules``) selects a projection of a decoder layer.

    Args:
        weights: names of a model's weights as its checkpoint has them.
    """
    layers = [name.removesuffix(".weight") for name in weights if ".layers." in name and name.endswith("_proj.weight")]
    return all(name == "all-linear" or any(f".{layer}".endswith(f".{name}") for layer in layers) for name in names)
