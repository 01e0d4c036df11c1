"""How many parameters a decoder has and what it caches for a token, from its ``config.json``. Imports no torch.

Counts the matrices that decoders have in common: embeddings, attention with grouped queries or with a latent (DeepSeek-V2, arXiv
2405.04434), gated feed-forward layers, routed and shared experts, one norm or two per layer. What families have beyond these (indexers,
biases, compressors) is small next to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Types whose feed-forward layer has no gate.
_UNGATED = frozenset({"gpt_neox", "starcoder2", "phi", "nemotron", "gpt2", "opt", "bloom", "falcon", "gptj", "codegen"})


@dataclass(frozen=True)
class ModelSize:
    """Sizes of one decoder, in elements.

    Attributes:
        layers, hidden, vocab: decoder layers, width, rows of the embedding.
        embeddings: parameters of the embedding and of the output layer, where it has its own.
        attention: parameters of one layer's attention.
        dense: parameters of one dense feed-forward layer.
        routed: parameters of all routed experts of one sparse layer.
        shared: parameters of one sparse layer beside routed experts.
        sparse_layers: layers with experts.
        cached: elements cached for each token, in all layers.
        heads: heads of keys and values; 1 where they are a latent, which cannot be divided.
        active_ffn: inner units that a token meets in one layer, its experts together.
        mtp_layers: layers that predict a further token, beside ``layers``.
    """

    layers: int
    hidden: int
    vocab: int
    embeddings: int
    attention: int
    dense: int
    routed: int
    shared: int
    sparse_layers: int
    cached: int
    heads: int
    active_ffn: int
    mtp_layers: int = 0

    @property
    def experts(self) -> int:
        """Parameters of all routed experts."""
        return self.routed * self.sparse_layers

    @property
    def layer(self) -> int:
        """Parameters of the largest layer."""
        return self.attention + max(self.routed + self.shared, self.dense if self.sparse_layers < self.layers else 0)

    @property
    def parameters(self) -> int:
        """All parameters, without MTP layers."""
        sparse = self.sparse_layers * (self.routed + self.shared)
        dense = (self.layers - self.sparse_layers) * self.dense
        return self.embeddings + self.layers * (self.attention + 2 * self.hidden) + sparse + dense + self.hidden

    @property
    def mtp(self) -> int:
        """Parameters of the MTP layers: decoder layers, each with a projection of two inputs."""
        return self.mtp_layers * (self.layer + 2 * self.hidden * self.hidden)


def model_size(config: Mapping[str, Any], moe_layers: int, mtp_layers: int = 0) -> ModelSize | None:
    """The sizes of a language model; None where ``config.json`` lacks one of width, layers, vocabulary or heads.

    Args:
        config: ``config.json``; of a model with several parts its ``text_config`` is read.
        moe_layers: layers with experts (the fact ``model.moe_layers``).
        mtp_layers: the fact ``model.mtp_layers``.
    """
    text = config.get("text_config")
    keys = {**config, **text} if isinstance(text, Mapping) else config
    hidden, layers = _number(keys, "hidden_size", "n_embd"), _number(keys, "num_hidden_layers", "n_layer", "num_layers")
    vocab, heads = _number(keys, "vocab_size"), _number(keys, "num_attention_heads", "n_head")
    if not (hidden and layers and vocab and heads):
        return None
    attention, cached, kv_heads = _attention(keys, hidden, heads)
    matrices = 2 if str(keys.get("model_type")) in _UNGATED else 3
    inner = _number(keys, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    expert = _number(keys, "moe_intermediate_size", "expert_ffn_hidden_size") or inner
    experts = _number(keys, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    shared = _shared(keys, expert)
    top_k = _number(
        keys, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk", "moe_k"
    )
    dense = _number(keys, "intermediate_size_mlp") or inner
    return ModelSize(
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        embeddings=vocab * hidden * (1 if keys.get("tie_word_embeddings") else 2),
        attention=attention,
        dense=matrices * hidden * dense,
        routed=experts * matrices * hidden * expert,
        shared=matrices * hidden * shared + hidden * experts,
        sparse_layers=moe_layers,
        cached=layers * cached,
        heads=kv_heads,
        active_ffn=top_k * expert + shared if moe_layers else dense,
        mtp_layers=mtp_layers,
    )


def _number(keys: Mapping[str, Any], *names: str) -> int:
    """The first of these entries that is a number; 0 without one. A list holds one per layer: its largest."""
    for name in names:
        value = keys.get(name)
        if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
            return max(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def _attention(keys: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int, int]:
    """(parameters of a layer, elements cached for a token in a layer, heads that the cache divides into)."""
    if latent := _number(keys, "kv_lora_rank"):
        rope, nope = _number(keys, "qk_rope_head_dim"), _number(keys, "qk_nope_head_dim")
        value, queries = _number(keys, "v_head_dim"), heads * (nope + rope)
        rank = _number(keys, "q_lora_rank")
        query = rank * (hidden + queries) if rank else hidden * queries
        return (
            query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden,
            latent + rope,
            1,
        )
    size = _number(keys, "head_dim") or hidden // heads
    kv = _number(keys, "num_key_value_heads") or (1 if keys.get("multi_query") else heads)
    return hidden * size * 2 * (heads + kv), 2 * kv * size, kv


def _shared(keys: Mapping[str, Any], expert: int) -> int:
    """Inner units of all shared experts together."""
    if given := _number(keys, "shared_expert_intermediate_size", "shared_intermediate_size"):
        return given
    if str(keys.get("model_type", "")).startswith("llama4"):
        return expert
    if keys.get("enable_moe_block"):  # Gemma 4: experts next to a dense layer
        return _number(keys, "intermediate_size")
    return _number(keys, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") * expert
