"""The options: one for every field of ``options.json``, in a dataclass that is made from it.

A field that nobody sets keeps Megatron-Core's own default, or the one in ``DEFAULTS``.
"""

from __future__ import annotations

import json
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

from miles_core.plugin import option

#: Megatron-Core's class -> what it configures, in the words of ``--help``.
_OWNERS = {
    "ModelParallelConfig": "how the model is divided",
    "TransformerConfig": "the model",
    "OptimizerConfig": "the optimiser",
    "DistributedDataParallelConfig": "the reduction of gradients",
}
_TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "words": tuple[str, ...]}
#: What Megatron-Core 0.19 takes in the lists whose type does not say it.
_WORDS = {
    "recompute_modules": ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"),
    "cp_comm_type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
}
#: Values that differ from Megatron-Core's, and why.
DEFAULTS: dict[str, tuple[Any, str]] = {
    "tensor_model_parallel_size": (1, "1"),
    "pipeline_model_parallel_size": (1, "1"),
    "context_parallel_size": (1, "1"),
    "expert_model_parallel_size": (1, "1"),
    "grad_reduce_in_fp32": (True, "on: sums over micro-batches and ranks keep their bits"),
    "moe_token_dispatcher_type": ("alltoall", "alltoall"),
    "gradient_accumulation_fusion": (None, "on where there is a GPU"),
    "bias_activation_fusion": (None, "on where there is a GPU"),
    "bias_dropout_fusion": (None, "on where there is a GPU"),
    "apply_rope_fusion": (None, "on where there is a GPU, for rotary positions without YaRN"),
    "moe_permute_fusion": (None, "on where there is a GPU"),
    "optimizer_offload_fraction": (1.0, "1: all of it, with --optimizer-cpu-offload"),
    "moe_router_bias_update_rate": (0.0, "0: the policy's router is trained by its gradient alone"),
}


def table() -> list[dict[str, Any]]:
    """The rows of ``options.json``: name, owner, type, choices, and Megatron-Core's default as source text."""
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8"))
    return rows


def _entry(row: dict[str, Any]) -> tuple[str, Any, Any]:
    default, shown = DEFAULTS.get(row["name"], (None, row["default"].strip("'").lower()))
    kind = _TYPES.get(row["type"], str)
    words = row["type"] == "words"
    return (
        row["name"],
        kind if words or default is not None else kind | None,
        option(
            () if words else default,
            help=f"{_OWNERS[row['owner']]}: {row['owner']}.{row['name']} of Megatron-Core (default there: {shown})"
            if row["name"] not in DEFAULTS
            else f"{_OWNERS[row['owner']]}: {row['owner']}.{row['name']} of Megatron-Core (default: {shown})",
            choices=_WORDS.get(row["name"], tuple(row["choices"])),
            metavar="NAME,..." if words else "",
            ge=1 if row["name"].endswith("_size") and row["type"] == "int" else None,
        ),
    )


#: What is TransformerEngine's and no field of Megatron-Core's.
_BACKWARD = (
    "backward_override",
    str,
    option(
        "dequantized",
        help="gradients in TransformerEngine's number formats: dequantized multiplies what the forward pass multiplied in BF16, none "
        "quantises gradients too and is faster (default: dequantized)",
        choices=("dequantized", "none"),
    ),
)

MegatronConfig = make_dataclass(
    "MegatronConfig", [*(_entry(row) for row in table()), _BACKWARD], frozen=True, kw_only=True
)
MegatronConfig.__doc__ = """The fields of Megatron-Core's configurations, of which one that is None keeps Megatron-Core's default, and
TransformerEngine's ``backward_override``."""
MegatronConfig.__module__ = __name__
