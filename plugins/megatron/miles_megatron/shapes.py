"""Derives the shapes of a checkpoint's tensors from the architecture. Imports no torch."""

from __future__ import annotations

from miles_megatron.architecture import Architecture
from miles_megatron.families.parts import Entry

Shape = tuple[int, ...]


def shapes(entry: Entry, a: Architecture) -> dict[str, Shape]:
    """Return name -> shape of the checkpoint's tensors of an entry. MTP layers are not supported."""
    layer, _, part = entry.name.rpartition(".mlp.")
    if not layer:
        layer, _, part = entry.name.rpartition(".self_attention.")
        found = _mixer(entry, part, a) if layer else _ends(entry.name, a)
    elif part.startswith("router."):
        assert a.experts is not None
        found = ((a.experts.count, a.hidden) if part == "router.weight" else (a.experts.count,),)
    elif part == "shared_experts.gate_weight":
        found = ((1, a.hidden),)
    elif part.endswith("_latent_proj.weight"):
        assert a.experts is not None
        sides = (a.experts.latent, a.hidden)
        found = (sides if part.startswith("fc1") else sides[::-1],)
    else:
        found = _feed_forward(entry, part, a)
    return dict(zip(entry.checkpoint, found, strict=True))


def _ends(name: str, a: Architecture) -> tuple[Shape, ...]:
    """Return the shape of the embedding, the output layer, or a norm outside of attention."""
    return ((a.hidden,),) if name.endswith("layernorm.weight") else ((a.vocab, a.hidden),)


def _mixer(entry: Entry, part: str, a: Architecture) -> tuple[Shape, ...]:
    """Return the shapes of attention, of a gated delta net or of a Mamba-2 mixer."""
    if (d := a.mamba) is not None and part not in ("linear_qkv.weight", "linear_proj.weight"):
        if entry.sections:
            behind = {"conv1d_weight": (1, d.width), "conv1d_bias": ()}.get(part, (a.hidden,))
            return ((sum(entry.sections[0]), *behind),)
        return ({"norm.weight": (d.inner,), "out_proj.weight": (a.hidden, d.inner)}.get(part, (d.heads,)),)
    if a.delta is None or part.split(".")[0] not in ("in_proj", "conv1d", "A_log", "dt_bias", "out_norm", "out_proj"):
        return _attention(part, a)
    if entry.sections:
        behind = (1, a.delta.width) if part == "conv1d.weight" else (a.hidden,)
        return tuple((sum(sizes), *behind) for sizes in entry.sections)
    heads = (a.delta.value_heads,)
    return ({"out_norm.weight": (a.delta.value_size,), "out_proj.weight": (a.hidden, a.delta.values)}.get(part, heads),)


def _attention(part: str, a: Architecture) -> tuple[Shape, ...]:
    name, _, kind = part.rpartition(".")
    if name == "linear_qkv":
        sizes = (a.q_size * (2 if a.output_gate else 1), a.kv_size, a.kv_size)
        return tuple((size, a.hidden) if kind == "weight" else (size,) for size in sizes)
    if part == "linear_proj.bias":
        return ((a.hidden,),)
    if a.latent is None:
        whole = a.qk_norm == "whole"
        return (
            {
                "q_layernorm": (a.q_size if whole else a.head_dim,),
                "k_layernorm": (a.kv_size if whole else a.head_dim,),
                "core_attention": (a.heads,),
                "linear_proj": (a.hidden, a.q_size),
            }[name],
        )
    low = a.latent
    queries = a.heads * (low.nope + low.rope)
    return (
        {
            "linear_q_down_proj": (low.q_rank, a.hidden),
            "q_layernorm": (low.q_rank,),
            "linear_q_up_proj": (queries, low.q_rank),
            "linear_q_proj": (queries, a.hidden),
            "linear_kv_down_proj": (low.kv_rank + low.rope, a.hidden),
            "kv_layernorm": (low.kv_rank,),
            "linear_kv_up_proj": (a.heads * (low.nope + low.value), low.kv_rank),
            "linear_proj": (a.hidden, a.heads * low.value),
        }[name],
    )


def _feed_forward(entry: Entry, part: str, a: Architecture) -> tuple[Shape, ...]:
    """Return the shapes of an MLP: dense, shared experts, one expert, or all experts in one tensor."""
    first, weight = ".linear_fc1." in f".{part}", part.endswith(".weight")
    inner, outer = a.ffn, a.hidden
    if a.experts is not None and entry.expert is not None:
        inner, outer = a.experts.ffn, a.experts.latent or a.hidden
    elif a.experts is not None and part.startswith("shared_experts."):
        inner = a.experts.shared
    if entry.layout.startswith("stacked"):
        assert a.experts is not None
        sides = (a.hidden, 2 * inner) if first else (inner, a.hidden)
        return ((a.experts.count, *(sides if weight else sides[1:])),)
    return ((inner, outer),) * (2 if a.gated else 1) if first else ((outer, inner),)
