"""SGLang's FP8 layers on a CPU, which has no kernels for them: a plugin of SGLang (``sglang.srt.plugins``) for tests.

Weights are multiplied as the numbers that their codes and scales stand for; activations are not rounded.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """What SGLang calls in each of its processes before it starts."""
    from sglang.srt.layers.quantization import fp8

    fp8.dispatch_w8a8_block_fp8_linear = lambda: _product
    fp8.Fp8LinearMethod.process_weights_after_loading_block_quant = lambda self, layer: None


def _product(
    input: Any, weight: Any, block_size: list[int], weight_scale: Any, input_scale: Any = None, bias: Any = None
) -> Any:
    rows, columns = weight.shape
    scale = weight_scale.repeat_interleave(block_size[0], 0)[:rows].repeat_interleave(block_size[1], 1)[:, :columns]
    found = input @ (weight.to(input.dtype) * scale.to(input.dtype)).t()
    return found if bias is None else found + bias
