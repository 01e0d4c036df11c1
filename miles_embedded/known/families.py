"""Families whose weights can be derived without their code: the entries of ``config.json``, and the resulting tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
#: Tensors: (name, shape).
Weights = Iterator[tuple[str, tuple[int, ...]]]
#: Tests of an entry's value: a positive integer; a finite number of at least 0; true or false; a text.
COUNT, NUMBER, SWITCH, TEXT = "count", "number", "switch", "text"


def tests(names: str, test: str) -> dict[str, str]:
    """Return a table that gives all ``names``, separated by spaces, the same test."""
    return dict.fromkeys(names.split(), test)


def fits(test: str, value: Any) -> bool:
    """Return whether a value passes a test."""
    if test == SWITCH:
        return isinstance(value, bool)
    if test == TEXT:
        return isinstance(value, str)
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return number and (test == NUMBER or (isinstance(value, int) and value > 0))


@dataclass(frozen=True)
class Family:
    """What distinguishes a family.

    Attributes:
        entries: further entries of ``config.json`` and the tests of their values.
        required: further entries that must be present.
        head: size of a head if ``head_dim`` is absent; 0 for the hidden size divided by the heads.
        tied: whether the output layer is the embedding if ``tie_word_embeddings`` is absent.
        bias: which projections of attention have a bias: letters of ``qkvo``; those in ``biased`` only with ``attention_bias``.
        norms: norms of a layer.
        query_norm: sizes of the norms of queries and keys: ``""``, ``"head"`` or ``"all"``.
        tower: name of its tower in ``towers.TOWERS``; None for a model of text.
        stack: beginning of the names of the language model's tensors.
        tower_names: beginning of the names of the tower's.
        feed_forward: yields the weights of the feed-forward part of layer i, without ``model.layers.i.``.
    """

    entries: Mapping[str, str]
    feed_forward: Callable[[Config, int], Weights]
    required: tuple[str, ...] = ()
    head: int = 0
    tied: bool = False
    bias: str = ""
    biased: str = ""
    attention_bias: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    query_norm: str = ""
    tower: str | None = None
    stack: str = "model"
    tower_names: str = "visual"


def _gated(prefix: str, hidden: int, inner: int, bias: bool = False) -> Weights:
    for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        yield f"{prefix}.{name}_proj.weight", shape
        if bias:
            yield f"{prefix}.{name}_proj.bias", shape[:1]


def _dense(c: Config, layer: int) -> Weights:
    yield from _gated("mlp", c["hidden_size"], c["intermediate_size"], bool(c.get("mlp_bias")))


def _qwen3_moe(c: Config, layer: int) -> Weights:
    if layer in (c.get("mlp_only_layers") or ()) or (layer + 1) % c.get("decoder_sparse_step", 1):
        yield from _dense(c, layer)
        return
    yield "mlp.gate.weight", (c["num_experts"], c["hidden_size"])
    for expert in range(c["num_experts"]):
        yield from _gated(f"mlp.experts.{expert}", c["hidden_size"], c["moe_intermediate_size"])


def _mixtral(c: Config, layer: int) -> Weights:
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    yield "block_sparse_moe.gate.weight", (c["num_local_experts"], hidden)
    for expert in range(c["num_local_experts"]):
        for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            yield f"block_sparse_moe.experts.{expert}.{name}.weight", shape


def _deepseek(c: Config, layer: int) -> Weights:
    if layer < c["first_k_dense_replace"]:
        yield from _dense(c, layer)
        return
    experts, inner = c["n_routed_experts"], c["moe_intermediate_size"]
    yield "mlp.gate.weight", (experts, c["hidden_size"])
    yield "mlp.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _gated(f"mlp.experts.{expert}", c["hidden_size"], inner)
    yield from _gated("mlp.shared_experts", c["hidden_size"], c["n_shared_experts"] * inner)


def _gpt_oss(c: Config, layer: int) -> Weights:
    experts, hidden, inner = c["num_local_experts"], c["hidden_size"], c["intermediate_size"]
    yield "self_attn.sinks", (c["num_attention_heads"],)
    yield "mlp.router.weight", (experts, hidden)
    yield "mlp.router.bias", (experts,)
    for name, size in (("gate_up_proj", (hidden, 2 * inner)), ("down_proj", (inner, hidden))):
        yield f"mlp.experts.{name}", (experts, *size)
        yield f"mlp.experts.{name}_bias", (experts, size[1])


_WINDOW = {"sliding_window": COUNT, "use_sliding_window": SWITCH, "max_window_layers": NUMBER}
_BIAS = {"attention_bias": SWITCH}
_ROUTER = {"output_router_logits": SWITCH, "router_aux_loss_coef": NUMBER, "norm_topk_prob": SWITCH}
_SHARED = {
    **tests("moe_intermediate_size n_shared_experts n_routed_experts n_group topk_group", COUNT),
    **tests("num_experts_per_tok moe_layer_freq", COUNT),
    **tests("first_k_dense_replace routed_scaling_factor num_nextn_predict_layers aux_loss_alpha", NUMBER),
    **_ROUTER,
    "seq_aux": SWITCH,
}
_SHARED_REQUIRED = tuple(n for n, kind in _SHARED.items() if kind == COUNT and n != "moe_layer_freq")
_GEMMA = {
    **tests("query_pre_attn_scalar sliding_window", COUNT),
    **tests("final_logit_softcapping attn_logit_softcapping", NUMBER),
    **_BIAS,
    "cache_implementation": TEXT,
}
_FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_LLAMA = Family({**_BIAS, "mlp_bias": SWITCH}, _dense, biased="qkvo")
_GRANITE = tests("embedding_multiplier logits_scaling residual_multiplier attention_multiplier", NUMBER)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family({"sliding_window": COUNT}, _dense),
    "granite": Family({**_LLAMA.entries, **_GRANITE}, _dense, biased="qkvo"),
    "qwen2": Family(_WINDOW, _dense, bias="qkv"),
    "qwen3": Family({**_WINDOW, **_BIAS}, _dense, head=128, biased="qkvo", query_norm="head"),
    "qwen3_moe": Family(
        {
            **_WINDOW,
            **_BIAS,
            **_ROUTER,
            **tests("decoder_sparse_step moe_intermediate_size num_experts num_experts_per_tok", COUNT),
        },
        _qwen3_moe,
        ("moe_intermediate_size", "num_experts", "num_experts_per_tok"),
        biased="qkvo",
        query_norm="head",
    ),
    "mixtral": Family(
        {
            "sliding_window": COUNT,
            "router_jitter_noise": NUMBER,
            "num_local_experts": COUNT,
            "num_experts_per_tok": COUNT,
            **_ROUTER,
        },
        _mixtral,
        ("num_local_experts", "num_experts_per_tok"),
    ),
    "deepseek_v3": Family(
        {
            **_SHARED,
            **tests("kv_lora_rank q_lora_rank qk_rope_head_dim v_head_dim qk_nope_head_dim qk_head_dim ep_size", COUNT),
            **_BIAS,
            "rope_interleave": SWITCH,
        },
        _deepseek,
        (
            *_SHARED_REQUIRED,
            "first_k_dense_replace",
            "kv_lora_rank",
            "qk_rope_head_dim",
            "v_head_dim",
            "qk_nope_head_dim",
        ),
    ),
    "glm4_moe": Family(
        {**_SHARED, **_BIAS, "use_qk_norm": SWITCH, "partial_rotary_factor": NUMBER},
        _deepseek,
        (*_SHARED_REQUIRED, "first_k_dense_replace", "head_dim"),
        biased="qkv",
    ),
    "gpt_oss": Family(
        {
            **_BIAS,
            **_ROUTER,
            **tests("num_local_experts num_experts_per_tok experts_per_token initial_context_length", COUNT),
            **tests("swiglu_limit swiglu_alpha", NUMBER),
            "sliding_window": COUNT,
        },
        _gpt_oss,
        ("num_local_experts", "num_experts_per_tok", "head_dim", "sliding_window"),
        biased="qkvo",
        attention_bias=True,
    ),
    "gemma2": Family(_GEMMA, _dense, ("sliding_window",), 256, True, biased="qkvo", norms=_FOUR_NORMS),
    "gemma3_text": Family(
        {**_GEMMA, "rope_local_base_freq": NUMBER, "sliding_window_pattern": COUNT, "_sliding_window_pattern": COUNT},
        _dense,
        ("sliding_window",),
        256,
        True,
        biased="qkvo",
        norms=_FOUR_NORMS,
        query_norm="head",
    ),
    "olmo2": Family(_BIAS, _dense, biased="qkvo", norms=_FOUR_NORMS[1::2], query_norm="all"),
    "smollm3": Family(
        {**_BIAS, **_WINDOW, "mlp_bias": SWITCH, "no_rope_layer_interval": COUNT}, _dense, tied=True, biased="qkvo"
    ),
    "qwen2_vl": Family(_WINDOW, _dense, bias="qkv", tower="qwen2_vl"),
    "qwen2_5_vl": Family(_WINDOW, _dense, bias="qkv", tower="qwen2_5_vl"),
    "qwen3_vl": Family(
        _BIAS,
        _dense,
        ("head_dim",),
        biased="qkvo",
        query_norm="head",
        tower="qwen3_vl",
        stack="model.language_model",
        tower_names="model.visual",
    ),
}
