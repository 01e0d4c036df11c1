"""What Megatron-Core's model lacks of a family, so that the plan can say so. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from miles_megatron.architecture import Architecture


def lacks(a: Architecture) -> Iterator[str]:
    """A sentence for each thing that this model needs and ``--trainer megatron`` does not have."""
    if a.qk_norm == "whole":
        yield f"{a.family} normalises all heads of queries and keys together, and Megatron-Core each head by itself"
    if a.sinks or a.mlp_bias:
        yield f"{a.family} has attention with sinks and experts with biases, which the trainer does not build yet"
    elif any(a.windows):
        yield f"some layers of this {a.family} model attend inside of a window, which the trainer does not build yet"
    if a.experts is not None and a.experts.score == "sigmoid" and not a.experts.renormalise:
        yield "Megatron-Core always divides sigmoid routing weights by their sum, and norm_topk_prob is false here"
    scaling = a.rotary.scaling
    kind = scaling.get("rope_type")
    known = "yarn" if a.latent else "llama3"
    if kind and kind != known:
        yield f"rope_type {kind} is not there for this attention; {known} is"
    elif kind == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for name, value in fixed.items():
            if scaling.get(name, value) != value:
                yield f"Megatron-Core's llama3 scaling has {name} = {value}, and config.json says {scaling[name]}"
