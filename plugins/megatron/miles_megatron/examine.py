"""Checks a checkpoint's ``config.json`` and weight headers against the family's table of weights, before the run loads it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from miles_core.plugin import CheckpointError
from miles_megatron import families
from miles_megatron.architecture import Architecture
from miles_megatron.families.parts import MTP_PREFIX
from miles_megatron.shapes import shapes

#: Tensors in checkpoints that are derived from ``config.json``.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def examine(config: Any, weights: bool) -> None:
    """Implements ``miles_core.plugin.Plugin.examine``: finds errors that would stop the run at load time or silently drop a weight."""
    options = config.model
    flag, path = ("--ref-load", options.ref_load) if options.ref_load else ("--hf-checkpoint", options.hf_checkpoint)
    if path is None or not Path(path).is_dir():
        return
    if any(Path(path).glob("*.safetensors*")):
        examine_checkpoint(Path(path), flag)
    elif weights:
        raise CheckpointError(f"{flag} {path}: it has no *.safetensors files; other weight files are not supported")


def examine_checkpoint(directory: Path, flag: str = "--hf-checkpoint") -> None:
    """Check that the trainer can load a checkpoint and uses all of its tensors.

    Raises:
        CheckpointError: the checkpoint is quantised; a tensor is missing, has another shape or is in no table; or an error of
            ``CheckpointFiles``.
    """
    from miles_core.trainer import CheckpointFiles  # imports torch

    files = CheckpointFiles(directory, flag)
    if files.config.get("quantization_config"):
        raise CheckpointError(
            f"{directory} is quantised, but --trainer megatron reads only BF16 weights: give a BF16 copy with --ref-load"
        )
    a = families.read(files.config)
    table = [entry for entry in families.weights(a) if not entry.name.startswith("mtp.")]
    wanted = {name: shape for entry in table for name, shape in shapes(entry, a).items()}
    where = f"{flag} {directory}"
    missing = [name for name in wanted if name not in files.entries]
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} weights of a {a.family} model are missing, the first is {missing[0]}; is the checkpoint complete?"
        )
    for name, shape in wanted.items():
        if files.entries[name].shape != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(files.entries[name].shape)}, but config.json implies {list(shape)}; one of the two "
                "belongs to another model"
            )
    odd = [name for name in files.entries if name not in wanted and not _ignored(name, a)]
    if odd:
        raise CheckpointError(
            f"{where}: {len(odd)} weights are not in the table of {a.family}, the first is {odd[0]}: they would be neither trained nor "
            "exported; train with --trainer embedded, or extend the table (miles_megatron/families)"
        )


def _ignored(name: str, a: Architecture) -> bool:
    """Whether the model needs no such tensor: MTP layers, a tied output layer, derived tensors."""
    layer = _LAYER.search(name)
    return (
        bool(layer and int(layer[1]) >= a.layers)
        or name.startswith(MTP_PREFIX)
        or (a.tied and name == "lm_head.weight")
        or bool(_DERIVED.search(name))
    )
