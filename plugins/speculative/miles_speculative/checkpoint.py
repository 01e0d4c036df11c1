"""Implements ``miles convert``: adds an MTP layer to a checkpoint, or creates an EAGLE head for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from miles_core.plugin import ConfigError
from miles_embedded import add_layer, export_checkpoint, load_model
from miles_speculative.config import SpeculativeConfig
from miles_speculative.eagle import new_eagle
from miles_speculative.head import initialise, make_layer


def convert(source: Path, target: Path, options: SpeculativeConfig) -> str:
    """Run ``with_mtp`` for ``--mtp-num-layers 1`` or ``new_eagle`` for ``--eagle-num-layers``; returns a message for the user."""
    if options.eagle_num_layers:
        made = new_eagle(source, target, options.eagle_num_layers)
        return f"wrote {made}, an untrained EAGLE head for {source}; train it with --draft-model-path {made} --online-sft-interval 1"
    if options.mtp_num_layers != 1:
        raise ConfigError(
            f"--mtp-num-layers {options.mtp_num_layers}: only one layer can be created, which drafts all tokens of a step; give 1"
        )
    return f"wrote {with_mtp(source, target)}, with an MTP layer that starts as a copy of the last decoder layer"


def with_mtp(source: Path | str, target: Path | str) -> Path:
    """Write the checkpoint ``source`` with one more MTP layer, initialised by ``initialise``, into ``target``; returns ``target``.

    Raises:
        CheckpointError: the checkpoint cannot be read or written, or the backend cannot run single layers of its family.
    """
    model: Any = load_model(source)
    layer = make_layer(model)
    add_layer(model, layer)
    initialise(model, layer)
    model.config.get_text_config().num_nextn_predict_layers = 1
    export_checkpoint(model, AutoTokenizer.from_pretrained(source), target)
    return Path(target)
