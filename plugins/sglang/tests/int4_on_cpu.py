"""SGLang's INT4 layers on a CPU, which has no kernels for them: a plugin of SGLang (``sglang.srt.plugins``) for tests.

SGLang's own classes load the codes and decide when they are packed. Packing reverses the order of the words and gives them the shape of the
GPU's layout; weights are multiplied as the numbers that their codes and scales stand for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

#: Rows of a tile of the packed layout.
_TILE = 16


def install() -> None:
    """What SGLang calls in each of its processes before it starts."""
    import torch
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16 as dense
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_wNa16_moe as experts

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    dense.gptq_marlin_repack = lambda words, perm, size_k, size_n, num_bits: _pack(words)
    experts.gptq_marlin_moe_repack = lambda words, perm, size_k, size_n, num_bits: torch.stack(
        [_pack(w) for w in words]
    )
    dense.WNA16_SUPPORTED_TYPES_MAP[4] = SimpleNamespace(size_bits=4)
    for module in (dense, experts):
        module.marlin_make_workspace = lambda device, *_: torch.zeros(4, dtype=torch.int32)
    dense.CompressedTensorsWNA16.apply_weights = _multiply
    experts.CompressedTensorsWNA16MoE.apply_weights = _experts


def _pack(words: Any) -> Any:
    rows, columns = words.shape
    return words.flip(0).reshape(rows * 8 // _TILE, columns * _TILE // 8)


def _numbers(packed: Any, scales: Any) -> Any:
    """[K, N] of packed words [K / 16, 2 N] and permuted scales [groups, N]."""
    import torch
    from sglang.srt.layers.quantization.marlin_utils import get_scale_perms

    groups, columns = scales.shape
    words = packed.reshape(-1, columns).flip(0)
    codes = torch.stack([(words >> 4 * i) & 15 for i in range(8)], 1).reshape(-1, columns) - 8
    order = torch.tensor(get_scale_perms()[0])  # of more than one group in a row
    plain = scales.reshape(-1, len(order))[:, order.argsort()].reshape(groups, columns)
    return codes.to(scales.dtype) * plain.repeat_interleave(len(codes) // groups, 0)


def _multiply(scheme: Any, layer: Any, x: Any, bias: Any = None) -> Any:
    found = x @ _numbers(layer.weight_packed, layer.weight_scale)
    return found if bias is None else found + bias


def _experts(scheme: Any, layer: Any, dispatch_output: Any) -> Any:
    import torch
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    def weights(packed: Any, scales: Any) -> Any:
        pairs = zip(packed, scales, strict=True)
        return torch.stack([_numbers(words, scale).t() for words, scale in pairs])

    plain = SimpleNamespace(
        num_experts=layer.num_experts,
        w13_weight=weights(layer.w13_weight_packed, layer.w13_weight_scale),
        w2_weight=weights(layer.w2_weight_packed, layer.w2_weight_scale),
    )
    found = moe_forward_native(
        plain, dispatch_output.hidden_states, dispatch_output.topk_output, scheme.moe_runner_config
    )
    return StandardCombineInput(hidden_states=found)
