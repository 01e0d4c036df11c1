"""Bamba: every layer has a gated MLP, and either Mamba-2 or attention with a partial rotary embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from miles_megatron.architecture import Architecture, Kind, Mamba, common
from miles_megatron.families.parts import PROJECTIONS, Entry, Names, attention, mamba, projections

NAMES = Names(norm="model.final_layernorm")
#: Share of a head's dimensions that is rotated; Transformers reads no other value from older files.
_ROTATED = 0.5


def read(config: Mapping[str, Any]) -> Architecture:
    """Read the architecture from ``config.json``."""
    given = common({"rms_norm_eps": 1e-5, "pad_token_id": 0, "partial_rotary_factor": _ROTATED, **config})
    inner = config.get("mamba_expand", 2) * given["hidden"]
    attending = config.get("attn_layer_indices") or ()
    return Architecture(
        **given,
        mixers=tuple("attention" if i in attending else "mamba" for i in range(given["layers"])),
        mamba=Mamba(
            config["mamba_n_heads"],
            inner // config["mamba_n_heads"],
            config.get("mamba_n_groups", 1),
            config["mamba_d_state"],
            config.get("mamba_d_conv", 4),
            config.get("mamba_chunk_size", 256),
        ),
    )


def layer(a: Architecture, m: str, h: str, kind: Kind) -> Iterator[Entry]:
    """Yield the entries of a layer; see ``miles_megatron.families``."""
    yield Entry(f"{m}.input_layernorm.weight", (f"{h}.input_layernorm.weight",))
    yield Entry(f"{m}.pre_mlp_layernorm.weight", (f"{h}.pre_ff_layernorm.weight",))
    yield from attention(a, m, h) if kind.mixer == "attention" else mamba(a, m, f"{h}.mamba")
    yield from projections(f"{m}.mlp", tuple(f"{h}.feed_forward.{part}" for part in PROJECTIONS))
