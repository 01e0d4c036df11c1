"""The kernels of this plugin inside SGLang's schedulers: a plugin of SGLang (``sglang.srt.plugins``) for runs with SGLang as the engine.

SGLang runs the model's Transformers code (``model_impl=transformers``) and keeps its scheduler, cache and sampler. This module replaces what
decides the last bit of a log-probability: matrix products, norms, rotations, gates, attention, the output layer and the log-softmax are the
functions of the embedded trainer with ``--true-on-policy-mode``, and so are experts, with the weights of SGLang's fused layers. Keys and
values are read from SGLang's cache. Without ``VARIABLE``, which the engine sets, it has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: Environment variable of an SGLang that computes with these kernels.
VARIABLE = "MILES_TRUE_ON_POLICY"
_LOADS = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess"


def install() -> None:
    """Register ``share_kernels`` to be called when a model has its weights. SGLang calls this in each of its processes."""
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_LOADS, share_kernels, HookType.AFTER)


def share_kernels(_: None, model: Any, *more: Any) -> None:
    """Make SGLang's model compute with the trainer's functions.

    Args:
        model: SGLang's ``TransformersForCausalLM``.
        more: further arguments of SGLang's loader.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        _replace_steps(model.model)
    finally:
        torch.set_default_dtype(default)
    _replace_functions()


def _replace_steps(backbone: Any) -> None:
    """Replace the steps of Transformers' model."""
    from miles_embedded import use_operations
    from miles_true_on_policy.hooks import make_operations
    from miles_true_on_policy.mode import compute_inside

    device = next(backbone.parameters()).device
    table = make_operations(device)
    done = use_operations(backbone, replace(table, norm=None))  # SGLang's norms are not modules of Transformers
    norms = [module for module in backbone.modules() if type(module).__name__.endswith("RMSNorm")]
    for module in norms:
        assert table.norm is not None
        module.forward = partial(_normalize, table.norm, module)
    rotary = backbone.rotary_emb
    with torch.device("cpu"):
        rotary.inv_freq = type(rotary)(rotary.config).inv_freq.to(device)  # the trainer computes them on the CPU
    experts = [module for module in backbone.modules() if type(module).__name__ == "TransformersFusedMoE"]
    for module in experts:
        module.forward = partial(_mix, table.experts, module.experts)
    compute_inside(backbone)
    print(f"shared kernels: {done}, {len(norms)} norms, {len(experts)} layers of experts", flush=True)


def _mix(compute: Callable[..., Tensor], layer: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts of a fused layer and record which were chosen.

    ``w13_weight`` holds gate and up [experts, 2 * inner, hidden], ``w2_weight`` [experts, hidden, inner]."""
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    if (recorder := get_global_experts_capturer()) is not None:
        recorder.capture(layer.layer_id, index)
    return compute(hidden, index.long(), weights, layer.w13_weight.data, layer.w2_weight.data)


def _normalize(norm: Callable[[Tensor, Tensor, float], Tensor], module: Any, x: Tensor) -> Tensor:
    return norm(x, module.weight.data, module.variance_epsilon)


def _replace_functions() -> None:
    """Replace SGLang's attention, output layer and log-softmax in this process."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from miles_true_on_policy.log_probs import log_softmax
    from miles_true_on_policy.products import multiply_rows

    plain = torch.nn.functional.log_softmax

    def normalize(x: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        simple = x.is_cuda and x.dtype == torch.float32 and dim in (-1, x.dim() - 1) and not args and not kwargs
        return log_softmax(x) if simple else plain(x, dim, *args, **kwargs)

    def compute_logits(_: Any, hidden: Tensor, head: Any, bias: Tensor | None = None) -> Tensor:
        return multiply_rows(hidden.to(head.weight.dtype), head.weight, bias)

    torch.nn.functional.log_softmax = normalize  # type: ignore[assignment]
    LogitsProcessor._compute_lm_head = compute_logits
    ALL_ATTENTION_FUNCTIONS["sglang"] = attend


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    forward_batch: Any,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend [1, heads, rows, dim] with the trainer's kernel; keys and values of earlier tokens are in SGLang's cache. Returns
    [rows, heads * dim]."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    from miles_true_on_policy.attention_kernel import Place, attend_tiles, choose_tile, queries_of

    backend, layer = get_attn_backend(), module.layer_idx
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    pool = backend.token_to_kv_pool
    keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
    keys[forward_batch.out_cache_loc], values[forward_batch.out_cache_loc] = k, v
    tile = choose_tile(q.dtype, q.shape[2], v.shape[2], forward_batch.forward_mode.is_decode())
    located = getattr(forward_batch, "miles_tiles", None)
    if located is None:  # the first layer of this batch: the others attend to the same slots
        located = forward_batch.miles_tiles = locate(
            forward_batch, backend.req_to_token, queries_of(tile, q.shape[1], k.shape[1])
        )
    slots, tiles = located
    # SGLang's cache holds prompts and generated tokens alike, so both places of the kernel are the same memory.
    key_places, value_places = ((Place.of_rows(x[slots]),) * 2 for x in (keys, values))
    out = attend_tiles(q, key_places, value_places, tiles, scaling, tile, None, k.shape[1])
    return out.flatten(1), None


def locate(batch: Any, req_to_token: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the slots of all tokens of a batch's sequences, one sequence after the other, and the ``tiles`` of ``attend_tiles``."""
    after = batch.seq_lens.tolist()
    count = [1] * len(after) if batch.forward_mode.is_decode() else batch.extend_seq_lens.tolist()
    table = req_to_token[batch.req_pool_indices]
    records, row, start = [], 0, 0
    for own, total in zip(count, after, strict=True):
        for offset in range(0, own, step):
            records.append((row + offset, min(step, own - offset), total - own + offset, 0, start, start))
        row, start = row + own, start + total
    slots = torch.cat([table[i, :total] for i, total in enumerate(after)]).long()
    return slots, torch.tensor(records, dtype=torch.int64, device=slots.device)
