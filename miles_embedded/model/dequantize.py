"""A quantised checkpoint as the embedded backend takes it: dequantised, as if it were a plain one.

Transformers would need kernels, or another library, for each format. Engine and trainer compute with plain matrices
here: the values that the checkpoint's codes mean, exactly in FP32, rounded in BF16.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from miles_tools.convert.decode import QuantizedFiles

log = logging.getLogger(__name__)


def dequantized(
    path: str | Path, config: Any, dtype: torch.dtype | None, flag: str = "--hf-checkpoint"
) -> dict[str, Tensor] | None:
    """The plain weights of a quantised checkpoint, checkpoint name -> tensor; None when it is not quantised.

    Args:
        path: the checkpoint directory.
        config: its Transformers configuration; its words about quantised weights are removed.
        dtype: of the weights; None is BF16.
        flag: what named the checkpoint, for messages.

    Raises:
        CheckpointError: no installed number format recognises it, or its files are damaged.
    """
    source = quantized(path, config, flag)
    if source is None:
        return None
    dtype = dtype or torch.bfloat16
    log.warning(
        "%s %s is quantised (%s): %d weights are dequantised to %s for the embedded engine and trainer; "
        "BF16 weights given as --ref-load DIR would be taken instead",
        flag,
        path,
        source.format.name,
        len(source.encoded),
        str(dtype).removeprefix("torch."),
    )
    return dict(source.tensors(dtype))


def quantized(path: str | Path, config: Any, flag: str) -> QuantizedFiles | None:
    """The files of a quantised checkpoint, of which the headers are read; None when it is not quantised. As ``dequantized``."""
    from miles_tools.convert.decode import open_quantized
    from miles_tools.convert.json_files import quantization_block

    if quantization_block(Path(path), config.to_dict()) is None:
        return None
    source = open_quantized(path, flag)
    for part in (config, *vars(config).values()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return source
