"""Operations and bytes of a model per token, from ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.plugin import layer_kinds, moe_layers
from miles_embedded import ModelSize, model_size

#: Kinds of layers that attend to the last tokens only.
_WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class ModelCost:
    """What a token costs.

    Attributes:
        size: parameters and cached elements.
        experts, top_k: routed experts per layer, and how many of them a token uses; 0 without experts.
        attended: elements of queries and outputs per layer that attends: a token's attention to n others takes ``2 * n * attended`` operations.
        attended_cache: as ``attended`` while decoding, where latent attention multiplies with the compressed cache.
        windowed, window: number of layers that attend to the last ``window`` tokens only.
    """

    size: ModelSize
    experts: int
    top_k: int
    attended: int
    attended_cache: int
    windowed: int = 0
    window: int = 0

    def attending(self, context: float) -> float:
        """Number of layers that attend to ``context`` tokens; a layer with a window counts as the share that it sees."""
        return self.size.attending - self.windowed * max(1 - self.window / max(context, 1.0), 0.0)

    @property
    def active(self) -> float:
        """Parameters that multiply one token, with the output layer and without the embedding."""
        s = self.size
        routed = s.routed * self.top_k / self.experts if self.experts else 0.0
        return s.vocab * s.hidden + s.attentions + s.states + s.feed_forward + s.sparse_layers * routed

    @property
    def moe(self) -> bool:
        """Whether any layer has experts."""
        return bool(self.experts and self.size.sparse_layers)

    def touched(self, tokens: float) -> float:
        """Expected parameters that a batch of ``tokens`` reads: all but those of experts that no token chose."""
        s = self.size
        share = 1 - (1 - self.top_k / self.experts) ** tokens if self.experts else 0.0
        return s.parameters - s.vocab * s.hidden * (s.embeddings > s.vocab * s.hidden) - (1 - share) * s.experts


def model_cost(config: Mapping[str, Any]) -> ModelCost | None:
    """Read the costs of a model; None if ``config.json`` does not determine them."""
    text = config.get("text_config")
    keys = {**config, **text} if isinstance(text, Mapping) else dict(config)
    size = model_size(config, len(moe_layers(keys)), int(keys.get("num_nextn_predict_layers") or 0))
    if size is None:
        return None
    heads = int(keys.get("num_attention_heads") or keys.get("n_head") or 0)
    if latent := int(keys.get("kv_lora_rank") or 0):
        rope, nope, value = (int(keys.get(k) or 0) for k in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        attended, cached = heads * (nope + rope + value), heads * (2 * latent + rope)
    else:
        attended = cached = 2 * heads * int(keys.get("head_dim") or size.hidden // heads)
    experts = _first(keys, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    top_k = _first(keys, "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
    window = _first(keys, "sliding_window", "attention_chunk_size")
    windowed = sum(kind in _WINDOWED for kind in layer_kinds(keys)) if window else 0
    sparse = size.sparse_layers > 0
    return ModelCost(size, experts if sparse else 0, top_k if sparse else 0, attended, cached, windowed, window)


def _first(keys: Mapping[str, Any], *names: str) -> int:
    return next((int(keys[name]) for name in names if isinstance(keys.get(name), int)), 0)
