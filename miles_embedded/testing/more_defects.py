"""Additional defects for ``benchmarks/mismatch/planted_defects.py``, taken from public bug reports about engines; most are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded.model.parts import backbone, decoder_layers, head, text_configuration
from miles_embedded.testing.defects import DEFECTS, WINDOW, Defect, change_rotation

Change = Callable[[Tensor], Tensor]


def after(module: nn.Module, change: Change) -> None:
    """Change the output of ``module``."""
    module.register_forward_hook(lambda _, args, output: change(output))


def before(module: nn.Module, change: Change) -> None:
    """Change the first input of ``module``."""
    module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))


def inside(path: str, *, at: int | None = None) -> Callable[[Any], Iterator[Any]]:
    """Find the submodule ``path`` of decoder layer ``at``; of every decoder layer if ``at`` is None."""

    def find(model: Any) -> Iterator[Any]:
        layers: Any = decoder_layers(model)
        for layer in layers if at is None else [layers[at]]:
            names = dict(layer.named_modules())
            if path in names:
                yield names[path]

    return find


def hooked(
    find: Callable[[Any], Iterator[Any]], hook: Callable[[nn.Module, Change], None], change: Any
) -> Callable[[Any], None]:
    """Make a ``plant`` that changes inputs or outputs; ``change(module)`` makes the change of one module."""

    def plant(model: Any) -> None:
        for module in find(model):
            hook(module, change(module))

    return plant


def scaled(factor: float) -> Callable[[Any], Change]:
    """Multiply by ``factor``."""
    return lambda module: lambda x: x * factor


def without_bias(module: Any) -> Change:
    """Subtract the module's bias."""
    return lambda x: x - module.bias


def without_factors(module: Any) -> Change:
    """Divide by the factors of a norm."""
    return lambda x: x / module.weight


def without(columns: slice) -> Callable[[Any], Change]:
    """Set columns to 0."""

    def change(x: Tensor) -> Tensor:
        kept = x.clone()
        kept[..., columns] = 0
        return kept

    return lambda module: change


def set_attribute(path: str, name: str, value: Any) -> Callable[[Any], None]:
    """Make a ``plant`` that changes an attribute of submodules: to ``value``, or to ``value(before)``."""

    def plant(model: Any) -> None:
        for module in inside(path)(model):
            if getattr(module, name, None) is not None:
                setattr(module, name, value(getattr(module, name)) if callable(value) else value)

    return plant


def _ignored_correction(model: Any) -> None:
    for gate in inside("mlp.gate")(model):
        hidden: dict[str, Tensor] = {}

        def enter(module: Any, args: Any, hidden: dict[str, Tensor] = hidden) -> None:
            hidden["bias"] = module._buffers["e_score_correction_bias"]
            module._buffers["e_score_correction_bias"] = torch.zeros_like(hidden["bias"])

        def leave(module: Any, args: Any, output: Any, hidden: dict[str, Tensor] = hidden) -> None:
            module._buffers["e_score_correction_bias"] = hidden["bias"]

        gate.register_forward_pre_hook(enter)
        gate.register_forward_hook(leave)


def _no_softcaps(model: Any) -> None:
    text_configuration(model).final_logit_softcapping = None
    set_attribute("self_attn", "attn_logit_softcapping", lambda cap: None)(model)


def routed_otherwise(change: Change, normalized: bool = True) -> Callable[[Any], None]:
    """Make a ``plant`` for Qwen3-MoE: experts are chosen from changed probabilities [tokens, experts]."""

    def plant(model: Any) -> None:
        for gate in inside("mlp.gate")(model):

            def hook(module: Any, args: Any, output: Any) -> Any:
                weights, index = change(output[0].float().softmax(-1)).topk(module.top_k, -1)
                if normalized:
                    weights = weights / weights.sum(-1, keepdim=True)
                return output[0], weights.to(output[1].dtype), index

            gate.register_forward_hook(hook)

    return plant


def _masked(probabilities: Tensor) -> Tensor:
    changed = probabilities.clone()
    changed[:, 0] = -1
    return changed


def weighted(change: Change, at: int | None = None) -> Callable[[Any], None]:
    """Make a ``plant`` that changes the weights [tokens, chosen] of the chosen experts."""

    def plant(model: Any) -> None:
        for experts in inside("mlp.experts", at=at)(model):
            experts.register_forward_pre_hook(lambda _, args: (args[0], args[1], change(args[2]), *args[3:]))

    return plant


def _dropped_tokens(weights: Tensor) -> Tensor:
    kept = torch.arange(len(weights), device=weights.device) % 8 != 7
    return weights * kept[:, None].to(weights)


def _no_sinks(model: Any) -> None:
    for attention in inside("self_attn")(model):
        attention.__dict__["sinks"] = torch.full_like(attention.sinks, -100.0)  # hides the parameter


def _no_shared_expert(model: Any) -> None:
    for shared in inside("mlp.shared_experts")(model):
        after(shared, torch.zeros_like)


def _permuted_heads(module: Any) -> Change:
    return lambda x: x.unflatten(-1, (4, -1)).roll(1, -2).flatten(-2)


def _wrong_row(model: Any) -> None:
    embed: Any = backbone(model).embed_tokens
    before(embed, lambda ids: torch.where(ids == 9, 10, ids))


def _swapped_outputs(model: Any) -> None:
    def swap(logits: Tensor) -> Tensor:
        order = torch.arange(logits.shape[-1], device=logits.device)
        order[8], order[9] = 9, 8
        return logits[..., order]

    after(head(model), swap)


def _shifted_shard(model: Any) -> None:
    after(head(model), lambda x: torch.cat([x[..., :48], x[..., 48:].roll(1, -1)], -1))


def _last_of_tile(module: Any) -> Change:
    def change(x: Tensor) -> Tensor:
        wrong = x.clone()
        wrong.view(-1, x.shape[-1])[15::16] *= 0.5
        return wrong

    return change


def _interleaved(model: Any) -> None:
    change_rotation(model, lambda part, _: part[..., : part.shape[-1] // 2].repeat_interleave(2, -1))


def _weak_rotation(model: Any) -> None:
    change_rotation(model, lambda x, positions: x * (1 - 0.05 * (positions >= 64))[..., None].to(x))


def _fast_rotation(model: Any) -> None:
    rotary: Any = backbone(model).rotary_emb
    rotary.inv_freq.copy_(rotary.inv_freq * 1.02)


def _epsilon(model: Any) -> None:
    for norm in model.modules():
        if hasattr(norm, "variance_epsilon"):
            norm.variance_epsilon *= 10


def _large_residual(model: Any) -> None:
    layers: Any = decoder_layers(model)
    after(layers[0], lambda output: output * 1.1 if isinstance(output, Tensor) else (output[0] * 1.1, *output[1:]))


def _rounded(module: Any) -> Change:
    return lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)


_DEEPSEEK = {"n_routed_experts": 8, "n_group": 2}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 64}
_LOW_CAP = {**_CAPS, "attn_logit_softcapping": 8.0}
_PLAIN_MOE = {"norm_topk_prob": False}

#: Those that outside reviews named.
NAMED = (
    Defect("value bias left out in one layer", "qwen2", hooked(inside("self_attn.v_proj", at=0), after, without_bias)),
    Defect("output bias left out", "gpt_oss", hooked(inside("self_attn.o_proj"), after, without_bias)),
    Defect("correction bias ignored", "deepseek_v3", _ignored_correction, _DEEPSEEK),
    Defect("attention scale x 1.02", "qwen3", set_attribute("self_attn", "scaling", lambda x: x * 1.02)),
    Defect("window off by one", "qwen3", set_attribute("self_attn", "sliding_window", lambda x: x + 1), WINDOW),
    Defect("both softcaps dropped", "gemma2", _no_softcaps, _CAPS),
    Defect("one expert never chosen", "qwen3_moe", routed_otherwise(_masked)),
)

FURTHER = (
    Defect("query norm without its factors", "qwen3", hooked(inside("self_attn.q_norm", at=1), after, without_factors)),
    Defect("norm without its factors", "llama", hooked(inside("input_layernorm", at=1), after, without_factors)),
    Defect("interleaved rotation", "llama", _interleaved),
    Defect("rotary frequencies x 1.02", "llama", _fast_rotation),
    Defect("weak rotation from position 64", "llama", _weak_rotation),
    Defect("residual x 1.1", "llama", _large_residual),
    Defect("one head lost", "llama", hooked(inside("self_attn.o_proj", at=1), before, without(slice(0, 8)))),
    Defect("heads in another order", "llama", hooked(inside("self_attn.q_proj", at=1), after, _permuted_heads)),
    Defect("last columns of the MLP lost", "llama", hooked(inside("mlp.down_proj", at=0), before, without(slice(-3, None)))),
    Defect("MLP x .92", "llama", hooked(inside("mlp"), after, scaled(0.92))),
    Defect("one row of 16 wrong", "llama", hooked(inside("mlp.down_proj", at=1), after, _last_of_tile)),
    Defect("keys in FP8", "llama", hooked(inside("self_attn.k_proj"), after, _rounded)),
    Defect("row of the embedding", "llama", _wrong_row),
    Defect("two output rows swapped", "qwen3", _swapped_outputs),
    Defect("shifted shard of the output layer", "qwen3", _shifted_shard),
    Defect("query bias left out", "qwen2", hooked(inside("self_attn.q_proj", at=1), after, without_bias)),
    Defect("output bias left out in one layer", "starcoder2", hooked(inside("mlp.c_proj", at=0), after, without_bias)),
    Defect("sinks ignored", "gpt_oss", _no_sinks),
    Defect("window short by one", "gpt_oss", set_attribute("self_attn", "sliding_window", lambda x: x - 1)),
    Defect("attention softcap dropped", "gemma2", set_attribute("self_attn", "attn_logit_softcapping", lambda cap: None), _LOW_CAP),
    Defect("logit scale x 1.02", "granite", hooked(lambda model: iter([backbone(model).norm]), after, scaled(1.02))),
    Defect("residual multiplier x .9", "granite", hooked(inside("mlp"), after, scaled(0.9))),
    Defect("top-k weights not normalized", "qwen3_moe", routed_otherwise(lambda p: p, normalized=False)),
    Defect("top-k weights normalized", "qwen3_moe", routed_otherwise(lambda p: p), _PLAIN_MOE),
    Defect("weights of experts x 1.1", "qwen3_moe", weighted(lambda w: w * 1.1)),
    Defect("second expert dropped in one layer", "qwen3_moe", weighted(lambda w: w * torch.tensor([1.0, 0.0]).to(w), at=1)),
    Defect("equal weights of experts", "qwen3_moe", weighted(lambda w: w.mean(-1, keepdim=True).expand_as(w))),
    Defect("router temperature 1.1", "qwen3_moe", routed_otherwise(lambda p: p ** (1 / 1.1))),
    Defect("one token of 8 dropped by experts", "qwen3_moe", weighted(_dropped_tokens)),
    Defect("shared expert left out", "deepseek_v3", _no_shared_expert, _DEEPSEEK),
    Defect("groups of experts ignored", "deepseek_v3", set_attribute("mlp.gate", "topk_group", 2), _DEEPSEEK),
    Defect("routed scaling factor left out", "deepseek_v3", weighted(lambda w: w / 2.5), _DEEPSEEK),
    Defect("weights of experts x .8", "mixtral", weighted(lambda w: w * 0.8)),
    Defect("latent norm without its factors", "deepseek_v3", hooked(inside("self_attn.kv_a_layernorm", at=0), after, without_factors)),
)  # fmt: skip

#: Defects below the rounding errors of these models in BF16. No comparison of outputs finds them there; ``docs/mismatch.md`` says so.
INVISIBLE = (
    Defect("epsilon x 10", "llama", _epsilon),
    Defect("MLP x .99", "llama", hooked(inside("mlp"), after, scaled(0.99))),
    Defect("weights of experts x 1.01", "qwen3_moe", weighted(lambda w: w * 1.01)),
)

#: All defects of models that are found.
MODELS = (*DEFECTS, *NAMED, *FURTHER)
