"""Building blocks of the families' tables of weights.

Entries use the names of Megatron-Core's local layer specification. ``transformer_engine_name`` converts them to TransformerEngine's
specification, which fuses norms into the following linear layer and groups experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from miles_megatron.architecture import Architecture, Kind

Layout = Literal["plain", "vocabulary", "qkv", "gate_up", "stacked", "stacked_gate_up", "sections"]

#: Name prefix of MTP layers that a checkpoint stores outside of the decoder (Qwen3-Next, Qwen3.5). They are not trained.
MTP_PREFIX = "mtp."


@dataclass(frozen=True)
class Entry:
    """One tensor of Megatron-Core's model and the corresponding tensors of the checkpoint.

    Attributes:
        name: name in Megatron-Core, with the layer index in the whole model.
        checkpoint: names in the checkpoint.
        layout: how to build the tensor from the checkpoint's; see ``miles_megatron.layout``.
        axis: the dimension that tensor parallelism splits; None if it is replicated.
        expert: index of its expert; None for other tensors.
        sections: with layout ``sections``, for each tensor of the checkpoint the rows of its sections.
        groups: number of groups of rows in the checkpoint's tensors; each has a part of every section. 1 without groups.
    """

    name: str
    checkpoint: tuple[str, ...]
    layout: Layout = "plain"
    axis: int | None = None
    expert: int | None = None
    sections: tuple[tuple[int, ...], ...] = ()
    groups: int = 1

    @property
    def is_matrix(self) -> bool:
        """Whether this is the weight of a linear layer in a decoder layer, not of an expert's router."""
        return _MATRIX.search(self.name) is not None


_MATRIX = re.compile(r"\.(?:linear_\w+|in_proj|out_proj|fc\d_latent_proj)\.weight$")


def transformer_engine_name(entry: Entry, architecture: Architecture) -> str:
    """Return the name of a tensor in TransformerEngine's layer specification."""
    name = entry.name
    layer = re.search(r"layers\.(\d+)\.", name)
    if architecture.latent is not None:
        name = name.replace(".self_attention.q_layernorm.weight", ".self_attention.linear_q_up_proj.layer_norm_weight")
        name = name.replace(
            ".self_attention.kv_layernorm.weight", ".self_attention.linear_kv_up_proj.layer_norm_weight"
        )
    elif layer:
        first = {"attention": "linear_qkv", "none": ""}.get(_kind(name, int(layer[1]), architecture).mixer, "in_proj")
        name = name.replace(".input_layernorm.weight", f".self_attention.{first}.layer_norm_weight")
    if layer and not _kind(name, int(layer[1]), architecture).sparse:
        name = name.replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
    return re.sub(r"\.experts\.local_experts\.(\d+)\.(linear_fc\d)\.(weight|bias)$", r".experts.\2.\3\1", name)


def _kind(name: str, layer: int, architecture: Architecture) -> Kind:
    """Return the kind of the layer of a tensor."""
    return architecture.mtp_kind if name.startswith("mtp.") else architecture.kinds[layer]


def ends(a: Architecture, names: Names) -> tuple[Entry, list[Entry]]:
    """Return the entry of the embedding, and the entries after the layers: final norm and, unless tied, output layer."""
    after = [Entry("decoder.final_layernorm.weight", (f"{names.norm}.weight",))]
    if not a.tied:
        after.append(Entry("output_layer.weight", (f"{names.output}.weight",), "vocabulary", 0))
    return Entry("embedding.word_embeddings.weight", (f"{names.embedding}.weight",), "vocabulary", 0), after


@dataclass(frozen=True)
class Names:
    """Names in a checkpoint: of the tensors outside the layers, and the prefix of the layers."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    output: str = "lm_head"


def norms(m: str, h: str) -> Iterator[Entry]:
    """Yield the two norms of a layer; ``m`` and ``h`` are its prefixes in Megatron-Core and in the checkpoint."""
    yield Entry(f"{m}.input_layernorm.weight", (f"{h}.input_layernorm.weight",))
    yield Entry(f"{m}.pre_mlp_layernorm.weight", (f"{h}.post_attention_layernorm.weight",))


def attention(a: Architecture, m: str, h: str, part: str = "self_attn") -> Iterator[Entry]:
    """Yield the entries of grouped-query attention; queries, keys and values form one matrix, interleaved by query group.

    part: the checkpoint's name of attention in a layer."""
    inner, outer = f"{m}.self_attention", f"{h}.{part}"
    for kind, present in (("weight", True), ("bias", a.qkv_bias)):
        if present:
            parts = tuple(f"{outer}.{p}_proj.{kind}" for p in "qkv")
            yield Entry(f"{inner}.linear_qkv.{kind}", parts, "qkv", 0)
    if a.qk_norm:
        axis = 0 if a.qk_norm == "whole" else None
        for part in "qk":
            yield Entry(f"{inner}.{part}_layernorm.weight", (f"{outer}.{part}_norm.weight",), "plain", axis)
    if a.sinks:
        yield Entry(f"{inner}.core_attention.softmax_offset", (f"{outer}.sinks",), "plain", 0)
    yield Entry(f"{inner}.linear_proj.weight", (f"{outer}.o_proj.weight",), "plain", 1)
    if a.out_bias:
        yield Entry(f"{inner}.linear_proj.bias", (f"{outer}.o_proj.bias",))


def projections(m: str, names: tuple[str, ...], expert: int | None = None) -> Iterator[Entry]:
    """Yield the entries of an MLP; ``names`` are the checkpoint's prefixes of gate, up and down, or without a gate of up and down."""
    *first, down = (f"{name}.weight" for name in names)
    yield Entry(f"{m}.linear_fc1.weight", tuple(first), "gate_up" if len(first) == 2 else "plain", 0, expert)
    yield Entry(f"{m}.linear_fc2.weight", (down,), "plain", 1, expert)


def mlp(m: str, h: str) -> Iterator[Entry]:
    """Yield the entries of a dense layer's MLP."""
    yield from projections(f"{m}.mlp", (f"{h}.mlp.gate_proj", f"{h}.mlp.up_proj", f"{h}.mlp.down_proj"))


def experts(a: Architecture, m: str, h: str, parts: tuple[str, ...], correction: str = "") -> Iterator[Entry]:
    """Yield the entries of a router at ``h.gate`` and of experts at ``h.experts.N``.

    Args:
        a: the architecture.
        m: prefix of the layer in Megatron-Core.
        h: prefix of the MoE block in the checkpoint.
        parts: the checkpoint's names of gate, up and down, or of up and down.
        correction: name of the router's correction bias in the checkpoint; empty for ``h.gate.e_score_correction_bias``.
    """
    assert a.experts is not None
    yield Entry(f"{m}.mlp.router.weight", (f"{h}.gate.weight",))
    if a.experts.correction:
        yield Entry(f"{m}.mlp.router.expert_bias", (correction or f"{h}.gate.e_score_correction_bias",))
    for e in range(a.experts.count):
        names = tuple(f"{h}.experts.{e}.{part}" for part in parts)
        yield from projections(f"{m}.mlp.experts.local_experts.{e}", names, e)


#: The names of gate, up and down in most families.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def shared(a: Architecture, m: str, h: str, parts: tuple[str, ...] = PROJECTIONS) -> Iterator[Entry]:
    """Yield the entries of the shared experts, if the model has any. parts: as for ``experts``."""
    assert a.experts is not None
    if a.experts.shared:
        yield from projections(f"{m}.mlp.shared_experts", tuple(f"{h}.{part}" for part in parts))


def mamba(a: Architecture, m: str, h: str) -> Iterator[Entry]:
    """Yield the entries of a Mamba-2 mixer; ``h`` is its prefix in the checkpoint. The first projection yields gate, x, B, C and steps."""
    assert a.mamba is not None
    d, inner = a.mamba, f"{m}.self_attention"
    joined = (d.inner, d.shared, d.shared)
    first = (d.inner, *joined, d.heads)
    yield Entry(f"{inner}.in_proj.weight", (f"{h}.in_proj.weight",), "sections", 0, sections=(first,))
    for name in ("weight", "bias"):
        yield Entry(f"{inner}.conv1d_{name}", (f"{h}.conv1d.{name}",), "sections", 0, sections=(joined,))
    for name in ("A_log", "D", "dt_bias", "norm.weight"):
        yield Entry(f"{inner}.{name}", (f"{h}.{name}",), "plain", 0)
    yield Entry(f"{inner}.out_proj.weight", (f"{h}.out_proj.weight",), "plain", 1)
