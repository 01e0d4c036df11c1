"""Number of parameters and cached elements of a decoder, from its ``config.json``. Does not import torch.

Counts the matrices that decoders have in common: embeddings, attention with grouped queries or a latent (DeepSeek-V2, arXiv
2405.04434), gated feed-forward layers, routed and shared experts, one or two norms per layer. Further parts of some families (indexers,
biases, compressors) are small in comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.plugin import NO_MIXER, STATE_KINDS, layer_kinds
from miles_embedded.memory.state_size import StateSize, state_size
from miles_embedded.memory.tower_size import TowerSize, tower_size

#: Model types whose feed-forward layers have no gate.
_UNGATED = frozenset(
    {"gpt_neox", "starcoder2", "phi", "nemotron", "gpt2", "opt", "bloom", "falcon", "gptj", "codegen", "nemotron_h"}
)


#: Model types whose attention has a gate for its output, of the size of the queries.
_GATED = ("qwen3_next", "qwen3_5")


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a decoder, in elements unless stated otherwise.

    Attributes:
        layers: number of decoder layers.
        hidden: width of the hidden states.
        vocab: rows of the embedding.
        embeddings: parameters of the embedding and, if it is separate, of the output layer.
        attention: parameters of the attention of one layer.
        dense: parameters of a dense feed-forward layer.
        routed: parameters of all routed experts of one sparse layer.
        shared: other feed-forward parameters of one sparse layer: shared experts, router, projections to and from a latent of the experts.
        sparse_layers: number of layers with experts.
        cached: cached elements per token, in all layers; of a latent, the latent and the rotated key.
        expanded: the same for an engine that caches the keys and values that it computes from a latent.
        heads: key/value heads; 1 for a latent, which cannot be split.
        active_ffn: intermediate units per token in one layer, summed over its experts.
        mtp_layers: number of MTP layers, not counted in ``layers``.
        attending: number of layers that attend.
        dense_layers: number of layers with a dense feed-forward layer.
        state: a layer that keeps a state between tokens, if there are any.
        state_layers: number of such layers.
        tower: the tower for images, which is not counted in ``parameters``, if there is one.
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
    expanded: int
    heads: int
    active_ffn: int
    attending: int
    dense_layers: int
    mtp_layers: int = 0
    state: StateSize | None = None
    state_layers: int = 0
    tower: TowerSize | None = None

    @property
    def experts(self) -> int:
        """Parameters of all routed experts."""
        return self.routed * self.sparse_layers

    @property
    def layer(self) -> int:
        """Parameters of the largest decoder layer."""
        mixer = max(self.attention, self.state.parameters if self.state else 0)
        return mixer + max(self.routed + self.shared, self.dense if self.sparse_layers < self.layers else 0)

    @property
    def attentions(self) -> int:
        """Parameters of the attention of all layers."""
        return self.attention * self.attending

    @property
    def states(self) -> int:
        """Parameters of all layers that keep a state, without their feed-forward parts."""
        return self.state_layers * self.state.parameters if self.state else 0

    @property
    def feed_forward(self) -> int:
        """Parameters of all feed-forward layers, without routed experts."""
        return self.dense * self.dense_layers + self.shared * self.sparse_layers

    @property
    def parameters(self) -> int:
        """All parameters, without MTP layers."""
        mixers = self.attentions + self.states
        return self.embeddings + mixers + 2 * self.layers * self.hidden + self.feed_forward + self.experts + self.hidden

    def state_bytes(self, width: int) -> int:
        """Bytes of the states of one sequence, in all layers, with a model dtype of ``width`` bytes."""
        return self.state_layers * self.state.bytes(width) if self.state else 0

    @property
    def mtp(self) -> int:
        """Parameters of the MTP layers: a decoder layer each, plus a projection of two inputs."""
        return self.mtp_layers * (self.layer + 2 * self.hidden * self.hidden)


def model_size(config: Mapping[str, Any], moe_layers: int, mtp_layers: int = 0) -> ModelSize | None:
    """Compute the sizes of a language model; None if ``config.json`` lacks the width, layers, vocabulary or heads.

    Args:
        config: content of ``config.json``; of a multimodal model its ``text_config`` is used.
        moe_layers: number of layers with experts (the fact ``model.moe_layers``).
        mtp_layers: number of MTP layers (the fact ``model.mtp_layers``).
    """
    text = config.get("text_config")
    keys = {**config, **text} if isinstance(text, Mapping) else config
    kinds = layer_kinds(keys)
    hidden = _number(keys, "hidden_size", "n_embd")
    layers = _number(keys, "num_hidden_layers", "n_layer", "num_layers") or len(kinds)
    vocab, heads = _number(keys, "vocab_size"), _number(keys, "num_attention_heads", "n_head")
    stateful = sum(kind in STATE_KINDS for kind in kinds)
    if not (hidden and layers and vocab and (heads or stateful == layers)):
        return None
    # without heads no layer attends, and Mamba's layers are all of it
    attention, cached, expanded, kv_heads = _attention(keys, hidden, heads) if heads else (0, 0, 0, 1)
    matrices, inner = 2 if str(keys.get("model_type")) in _UNGATED else 3, _inner(keys, hidden)
    expert = _number(keys, "moe_intermediate_size", "expert_ffn_hidden_size") or inner
    experts = _number(keys, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    shared, latent = _shared(keys, expert), _number(keys, "moe_latent_size")
    top_k = _number(
        keys, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_topk", "moe_k"
    )
    dense = _number(keys, "intermediate_size_mlp") or inner
    attending = sum(kind not in ("linear_attention", "conv", *NO_MIXER) for kind in kinds) if kinds else layers
    return ModelSize(
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        embeddings=vocab * hidden * (1 if keys.get("tie_word_embeddings") else 2),
        attention=attention,
        dense=matrices * hidden * dense,
        routed=experts * matrices * (latent or hidden) * expert,
        shared=matrices * hidden * shared + hidden * experts + 2 * hidden * latent,
        sparse_layers=moe_layers,
        cached=attending * cached,
        expanded=attending * expanded,
        heads=kv_heads,
        active_ffn=(top_k * expert + shared if moe_layers else dense) if heads else 0,
        mtp_layers=mtp_layers,
        attending=attending,
        dense_layers=kinds.count("mlp") if set(kinds) & NO_MIXER or not heads else layers - moe_layers,
        state=state_size(keys, hidden, heads) if stateful else None,
        state_layers=stateful,
        tower=tower_size(config),
    )


def _inner(keys: Mapping[str, Any], hidden: int) -> int:
    """Return the intermediate units of a dense feed-forward layer."""
    inner = _number(keys, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    if not keys.get("block_auto_adjust_ff_dim"):
        return inner
    factor, multiple = keys.get("block_ffn_dim_multiplier"), _number(keys, "block_multiple_of") or 1  # LFM2
    inner = 2 * inner // 3
    return inner if factor is None else multiple * -(-int(factor * inner) // multiple)


def _number(keys: Mapping[str, Any], *names: str) -> int:
    """Return the first of these entries that is a number, else 0. For a list with a value per layer, return the largest."""
    for name in names:
        value = keys.get(name)
        if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
            return max(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0


def _attention(keys: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int, int, int]:
    """Return (parameters per layer, cached elements per token and layer, the same with a latent expanded, heads that the cache can be split
    by)."""
    if latent := _number(keys, "kv_lora_rank"):
        rope, nope = _number(keys, "qk_rope_head_dim"), _number(keys, "qk_nope_head_dim")
        value, queries = _number(keys, "v_head_dim"), heads * (nope + rope)
        rank = _number(keys, "q_lora_rank")
        query = rank * (hidden + queries) if rank else hidden * queries
        return (
            query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden,
            latent + rope,
            queries + heads * value,
            1,
        )
    size = _number(keys, "head_dim") or hidden // heads
    kv = _number(keys, "num_key_value_heads") or (1 if keys.get("multi_query") else heads)
    gate = heads if str(keys.get("model_type")).startswith(_GATED) else 0
    return hidden * size * (2 * (heads + kv) + gate), 2 * kv * size, 2 * kv * size, kv


def _shared(keys: Mapping[str, Any], expert: int) -> int:
    """Intermediate units of all shared experts of a layer."""
    names = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
    if given := _number(keys, *names):
        return given
    if str(keys.get("model_type", "")).startswith("llama4"):
        return expert
    if keys.get("enable_moe_block"):  # Gemma 4: experts next to a dense layer
        return _number(keys, "intermediate_size")
    return _number(keys, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") * expert
