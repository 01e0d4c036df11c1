"""The codec that options describe: one rule for runs and for ``miles convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from miles_core.checkpoint.hf_files import CONFIG, CheckpointFiles, read_json
from miles_core.errors import ConfigError
from miles_core.plugin.detect import model_facts
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format
from miles_core.precision.fused_experts import Family
from miles_core.precision.selector import Exclusion, Selector, Shape

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.config.groups import Precision


def codec_for(format: type[Format], config: Config, checkpoint: str | None = None) -> Codec:
    """The codec of a number format with the options of ``config``: one rule for runs and for ``miles convert``.

    Args:
        format: the number format.
        config: its own options, and core's of precision.
        checkpoint: the model's, whose ``config.json`` says how many layers there are and how experts are joined.

    Raises:
        ConfigError: a layer range that does not fit the model.
    """
    made = format.from_config(config)
    excluded = exclusions(config.precision, checkpoint)
    codec = Codec(made, Selector(made.skip, made.skip_origin, made.only, made.only_origin, excluded))
    if checkpoint and (Path(checkpoint) / CONFIG).is_file():
        family = Family.of(read_json(Path(checkpoint) / CONFIG))
        codec.settle(_stored_shapes(checkpoint), family)
    return codec


def _stored_shapes(checkpoint: str) -> dict[str, Shape]:
    """Every tensor of a checkpoint in BF16 and its shape, read from the headers; none where they are not those of the
    model: a quantised checkpoint, or one without weights."""
    if "quantization_config" in read_json(Path(checkpoint) / CONFIG) or not any(Path(checkpoint).glob("*.safetensors")):
        return {}
    entries = CheckpointFiles(checkpoint, "--hf-checkpoint").entries.values()
    return {e.name: e.shape for e in entries if e.dtype.is_floating_point}


def exclusions(options: Precision, checkpoint: str | None) -> tuple[Exclusion, ...]:
    """What core's options leave alone; ``checkpoint`` and errors as for ``codec_for``."""
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
