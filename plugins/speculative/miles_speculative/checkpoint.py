"""What ``miles convert`` makes of a checkpoint: one with an MTP layer, or an EAGLE head for it."""

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
    """``miles convert --mtp-num-layers 1``: see ``with_mtp``; ``--eagle-num-layers``: see ``new_eagle``."""
    if options.eagle_num_layers:
        made = new_eagle(source, target, options.eagle_num_layers)
        return f"wrote {made}, an EAGLE head for {source} that is still to be trained (--draft-model-path {made} --online-sft-interval 1)"
    if options.mtp_num_layers != 1:
        raise ConfigError(
            f"--mtp-num-layers {options.mtp_num_layers}: one layer can be created, which drafts as often as wanted; give 1"
        )
    return f"wrote {with_mtp(source, target)}, with an MTP layer that starts as a copy of the last decoder layer"


def with_mtp(source: Path | str, target: Path | str) -> Path:
    """Write the checkpoint ``source`` with one MTP layer more, which starts as ``initialise`` says, into ``target``; returns it.

    Raises:
        CheckpointError: it cannot be read or written, or its family's layers cannot be run one by one.
    """
    model: Any = load_model(source)
    layer = make_layer(model)
    add_layer(model, layer)
    initialise(model, layer)
    model.config.get_text_config().num_nextn_predict_layers = 1
    export_checkpoint(model, AutoTokenizer.from_pretrained(source), target)
    return Path(target)
