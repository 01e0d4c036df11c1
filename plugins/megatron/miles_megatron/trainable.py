"""Model features that Megatron-Core does not support, for the plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from miles_megatron.architecture import Architecture


def find_unsupported(a: Architecture) -> Iterator[str]:
    """Yield a message for each feature of the model that ``--trainer megatron`` does not support."""
    if len(set(a.windows) - {0}) > 1:
        yield f"layers of this {a.family} model have windows of different sizes, and Megatron-Core supports one size for all"
    if a.experts is not None and a.experts.score == "sigmoid" and not a.experts.renormalise:
        yield "Megatron-Core always divides sigmoid routing weights by their sum, and norm_topk_prob is false here"
    scaling = a.rotary.scaling
    kind = scaling.get("rope_type")
    known = ("yarn",) if a.latent else ("llama3", "yarn")
    if kind and kind not in known:
        yield f"rope_type {kind} is not supported for this attention; {' and '.join(known)} are"
    elif kind == "yarn" and not a.latent and scaling.get("attention_factor") is not None:
        yield "Megatron-Core derives YaRN's attention factor from its scaling factor, and config.json gives another one"
    elif kind == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for name, value in fixed.items():
            if scaling.get(name, value) != value:
                yield f"Megatron-Core's llama3 scaling has {name} = {value}, and config.json says {scaling[name]}"
