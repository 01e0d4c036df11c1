"""Builds codecs from options, for runs and for ``miles convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.checkpoint.hf_files import CONFIG, CheckpointFiles, read_json
from miles_core.errors import ConfigError
from miles_core.plugin.detect import model_facts
from miles_core.precision.format import Format
from miles_formats.codec import FormatCodec
from miles_formats.fused_experts import Family
from miles_formats.selector import Exclusion, Selector, Shape

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.config.groups import Precision


def codec_for(format: type[Format], config: Config, checkpoint: str | None = None) -> FormatCodec:
    """Create the codec of a number format with the options of ``config``.

    Args:
        format: class of the number format.
        config: contains the format's options and core's precision options.
        checkpoint: the model's checkpoint; its ``config.json`` gives the number of layers and the layout of experts.

    Raises:
        ConfigError: a layer range does not fit the model.
    """
    made = format.from_config(config)
    excluded = exclusions(config.precision, checkpoint)
    codec = FormatCodec(made, Selector(made.skip, made.skip_origin, made.only, made.only_origin, excluded))
    if checkpoint and (Path(checkpoint) / CONFIG).is_file():
        family = Family.of(read_json(Path(checkpoint) / CONFIG))
        codec.settle(_stored_shapes(checkpoint), family)
    return codec


def _stored_shapes(checkpoint: str) -> dict[str, Shape]:
    """Return name -> shape of all tensors of a BF16 checkpoint, read from the headers; empty for a quantised checkpoint, whose
    tensors differ from the model's, and for one without weights."""
    if "quantization_config" in read_json(Path(checkpoint) / CONFIG) or not any(Path(checkpoint).glob("*.safetensors")):
        return {}
    entries = CheckpointFiles(checkpoint, "--hf-checkpoint").entries.values()
    return {e.name: e.shape for e in entries if e.dtype.is_floating_point}


def exclusions(options: Precision, checkpoint: str | None) -> tuple[Exclusion, ...]:
    """Return the exclusions that core's options define; ``checkpoint`` and errors as for ``codec_for``."""
    found = []
    if options.extra_high_precision_layers:
        found.append(Exclusion("--extra-high-precision-layers-hf", tuple(options.extra_high_precision_layers)))
    start, end = options.num_layers_at_start_in_bf16, options.num_layers_at_end_in_bf16
    if not start and not end:
        return tuple(found)
    layers = next(fact.value for fact in model_facts(checkpoint) if fact.name == "model.layers")
    if layers is None:
        raise ConfigError(
            f"--num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 {end} count decoder layers, but "
            f"config.json of {checkpoint} does not say how many there are; use --extra-high-precision-layers-hf"
        )
    if start + end >= layers:
        raise ConfigError(
            f"--num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 {end} leave none of the model's "
            f"{layers} layers to quantise; give smaller numbers, or use bf16"
        )
    if start:
        found.append(Exclusion("--num-layers-at-start-in-bf16", layers=range(start)))
    if end:
        found.append(Exclusion("--num-layers-at-end-in-bf16", layers=range(layers - end, layers)))
    return tuple(found)
