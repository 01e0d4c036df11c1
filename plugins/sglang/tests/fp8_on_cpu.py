"""SGLang's FP8 layers on a CPU, which has no kernels for them: a plugin of SGLang (``sglang.srt.plugins``) for tests.

Weights are multiplied as the numbers that their codes and scales stand for; activations are not rounded.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def install() -> None:
    """What SGLang calls in each of its processes before it starts."""
    from sglang.srt.layers.quantization import fp8

    fp8.dispatch_w8a8_block_fp8_linear = lambda: _product
    fp8.Fp8MoEMethod.apply = _experts
    for method in (fp8.Fp8LinearMethod, fp8.Fp8MoEMethod):
        method.process_weights_after_loading_block_quant = lambda self, layer: None


def _product(
    input: Any, weight: Any, block_size: list[int], weight_scale: Any, input_scale: Any = None, bias: Any = None
) -> Any:
    found = input @ _numbers(weight, weight_scale, block_size, input.dtype).transpose(0, 1)
    return found if bias is None else found + bias


def _experts(method: Any, layer: Any, dispatch_output: Any) -> Any:
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    hidden, block = dispatch_output.hidden_states, method.quant_config.weight_block_size
    plain = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=_numbers(layer.w13_weight, layer.w13_weight_scale_inv, block, hidden.dtype),
        w2_weight=_numbers(layer.w2_weight, layer.w2_weight_scale_inv, block, hidden.dtype),
    )
    found = moe_forward_native(plain, hidden, dispatch_output.topk_output, method.moe_runner_config)
    return StandardCombineInput(hidden_states=found)


def _numbers(weight: Any, scale: Any, block: list[int], dtype: Any) -> Any:
    """[..., rows, columns] of codes and the scales of their blocks."""
    rows, columns = weight.shape[-2:]
    each = scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]
    return (weight.float() * each).to(dtype)
