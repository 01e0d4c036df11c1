"""What is wrong with a checkpoint, from its ``config.json`` and the headers of its weights: the family's table says what is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from miles_core.plugin import CheckpointError
from miles_megatron import families
from miles_megatron.architecture import Architecture
from miles_megatron.shapes import shapes

#: Tensors that checkpoints hold and that follow from ``config.json``.
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def examine(config: Any, weights: bool) -> None:
    """See ``miles_core.plugin.Plugin.examine``: what would end the run when its model is loaded, or lose a weight in silence."""
    options = config.model
    flag, path = ("--ref-load", options.ref_load) if options.ref_load else ("--hf-checkpoint", options.hf_checkpoint)
    if path is None or not Path(path).is_dir():
        return
    if any(Path(path).glob("*.safetensors*")):
        examine_checkpoint(Path(path), flag)
    elif weights:
        raise CheckpointError(f"{flag} {path}: it holds no *.safetensors weights; others are not read")


def examine_checkpoint(directory: Path, flag: str = "--hf-checkpoint") -> None:
    """Whether the trainer can load a checkpoint, and has a place for all of it.

    Raises:
        CheckpointError: it is quantised; a tensor is missing, has another shape or is in no table; or see ``CheckpointFiles``.
    """
    from miles_core.trainer import CheckpointFiles  # with torch, which reads the headers' dtypes

    files = CheckpointFiles(directory, flag)
    if files.config.get("quantization_config"):
        raise CheckpointError(
            f"{directory} is quantised, and --trainer megatron reads BF16 weights: give a BF16 copy of them with --ref-load"
        )
    a = families.read(files.config)
    table = [entry for entry in families.weights(a) if not entry.name.startswith("mtp.")]
    wanted = {name: shape for entry in table for name, shape in shapes(entry, a).items()}
    where = f"{flag} {directory}"
    missing = [name for name in wanted if name not in files.entries]
    if missing:
        raise CheckpointError(
            f"{where}: {len(missing)} weights of a {a.family} model are missing, first {missing[0]}; is the checkpoint whole?"
        )
    for name, shape in wanted.items():
        if files.entries[name].shape != shape:
            raise CheckpointError(
                f"{where}: {name} is {list(files.entries[name].shape)} in its weights and {list(shape)} by config.json; one of the two "
                "is of another model"
            )
    odd = [name for name in files.entries if name not in wanted and not _ignored(name, a)]
    if odd:
        raise CheckpointError(
            f"{where}: {len(odd)} weights are in no table of a {a.family} model, first {odd[0]}: they would not be trained, and an export "
            "would lack them; train with --trainer embedded, or complete the table (miles_megatron/families)"
        )


def _ignored(name: str, a: Architecture) -> bool:
    """A tensor that has no place in the model and needs none: an MTP layer's, an output layer that is the embedding, a derived one."""
    layer = _LAYER.search(name)
    return (
        bool(layer and int(layer[1]) >= a.layers)
        or (a.tied and name == "lm_head.weight")
        or bool(_DERIVED.search(name))
    )
