"""Load a quantised checkpoint as plain weights.

Transformers would need kernels or another library for each format. Here engine and trainer compute with plain matrices: the exact
values of the checkpoint's codes in FP32, rounded in BF16.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from miles_formats.convert.decode import QuantizedFiles

log = logging.getLogger(__name__)


def dequantize(
    source: QuantizedFiles, path: str | Path, dtype: torch.dtype | None, flag: str = "--hf-checkpoint"
) -> dict[str, Tensor]:
    """Return the plain weights of a quantised checkpoint, checkpoint name -> tensor.

    Args:
        source: its files.
        path: the checkpoint directory, for messages.
        dtype: type of the weights; None for BF16.
        flag: flag that named the checkpoint, for messages.

    Raises:
        CheckpointError: its files are damaged.
    """
    dtype = dtype or torch.bfloat16
    log.warning(
        "%s %s is quantised (%s): %d weights are dequantised to %s for the embedded engine and trainer; "
        "pass BF16 weights as --ref-load DIR to use those instead",
        flag,
        path,
        source.format.name,
        len(source.encoded),
        str(dtype).removeprefix("torch."),
    )
    return dict(source.tensors(dtype))


def open_files(path: str | Path, config: Any, flag: str) -> QuantizedFiles | None:
    """Open a quantised checkpoint and read its headers; None if it is not quantised.

    Args:
        path: the checkpoint directory.
        config: its Transformers configuration; its quantisation entry is removed.
        flag: flag that named the checkpoint, for messages.

    Raises:
        CheckpointError: no installed number format recognises the checkpoint, or a part of a weight is missing.
    """
    from miles_formats.convert.decode import open_quantized
    from miles_formats.convert.json_files import quantization_block

    if quantization_block(Path(path), config.to_dict()) is None:
        return None
    source = open_quantized(path, flag)
    for part in (config, *vars(config).values()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return source
