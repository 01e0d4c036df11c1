"""Checks of a plan that need the checkpoint: it can be loaded, and the targets exist in its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from miles_core.plugin import ConfigError
from miles_embedded import build_empty, checkpoint_config, views
from miles_embedded import examine as examine_model
from miles_lora.peft_files import check_adapter
from miles_lora.targets import FLAG, Target, find_targets


def examine(config: Any, weights: bool) -> None:
    """Build the model without weights, and look for the targets in it; see ``miles_core.plugin.Plugin.examine``.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ConfigError: a target matches nothing, or conflicts with another option.
    """
    examine_model(config, weights)
    options, path = config.plugin("lora"), config.model.ref_load or config.model.hf_checkpoint
    if options.adapter is not None:
        check_adapter(options.adapter, options, path or "")
    if path is None:
        return
    model = build_empty(checkpoint_config(path, config.model.trust_remote_code), config.model.trust_remote_code)
    experts = [t for t in find_targets(model, options.target_modules) if t.is_joined]
    if experts and options.base_gpus > 1:
        raise ConfigError(
            f"--lora-base-gpus {options.base_gpus}: {experts[0].name} ({FLAG}) joins experts, which are divided as codes without adapters; leave the "
            "experts out (--lora-target-modules all-linear), or use one GPU"
        )
    if config.run.trainer == "megatron":
        _check_stacked(model, experts)
    if experts and options.dropout:
        raise ConfigError(
            f"--lora-dropout {options.dropout:g}: {experts[0].name} ({FLAG}) joins experts, whose inputs cannot be dropped separately for the "
            "adapter; leave the dropout out, or the experts"
        )


def _check_stacked(model: nn.Module, experts: Sequence[Target]) -> None:
    """Refuse experts that the checkpoint has in one tensor per layer: such a trainer reads them as matrices of single experts."""
    sources = [view.source for view in views(model)]
    for target in experts:
        if sources.count(target.source) == 1:
            raise ConfigError(
                f"--trainer megatron: {target.name} ({FLAG}) has all experts in one tensor of the checkpoint, and this trainer adapts linear "
                "layers, and experts with a tensor each; leave the experts out, or use --trainer embedded"
            )
