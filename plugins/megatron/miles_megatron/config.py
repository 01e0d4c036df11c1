"""The options of this plugin: a dataclass generated from ``options.json``, with one option per row.

An option without a value keeps Megatron-Core's default or the one in ``DEFAULTS``.
"""

from __future__ import annotations

import json
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

from miles_core.plugin import option

#: Megatron-Core's configuration class -> what it configures, for ``--help``.
_OWNERS = {
    "ModelParallelConfig": "model parallelism",
    "TransformerConfig": "the model",
    "OptimizerConfig": "the optimiser",
    "DistributedDataParallelConfig": "the reduction of gradients",
}
_TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "words": tuple[str, ...]}
#: Values that Megatron-Core 0.19 accepts in list options whose type does not declare them.
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
    "grad_reduce_in_fp32": (True, "on: sums over micro-batches and ranks keep FP32 precision"),
    "moe_token_dispatcher_type": ("alltoall", "alltoall"),
    "gradient_accumulation_fusion": (None, "on with a GPU"),
    "bias_activation_fusion": (None, "on with a GPU"),
    "bias_dropout_fusion": (None, "on with a GPU"),
    "apply_rope_fusion": (None, "on with a GPU, for rotary embeddings without YaRN"),
    "moe_permute_fusion": (None, "on with a GPU"),
    "optimizer_offload_fraction": (1.0, "1: the whole state, with --optimizer-cpu-offload"),
    "moe_router_bias_update_rate": (0.0, "0: only gradients train the policy's router"),
    "moe_token_drop_policy": ("probs", "probs"),
}
#: Options whose flag other packages have too, which agree on its help: name -> flag, further spellings, help.
SHARED: dict[str, tuple[str, tuple[str, ...], str]] = {
    "moe_expert_capacity_factor": (
        "--moe-capacity-factor",
        ("--moe-expert-capacity-factor",),
        "in the trainer an expert computes at most ceil(F * tokens * top_k / experts) tokens of a micro-batch and drops the others",
    ),
    "moe_token_drop_policy": (
        "--moe-token-drop-policy",
        (),
        "which tokens an expert at its capacity keeps: those with the largest weights (probs), or the first ones (position)",
    ),
    "moe_router_bias_update_rate": (
        "--moe-router-bias-update-rate",
        (),
        "after each optimiser step, change the correction bias of each expert by this rate towards the mean load (0: no change)",
    ),
}


def table() -> list[dict[str, Any]]:
    """Return the rows of ``options.json``: name, owner, type, choices, and Megatron-Core's default as source text."""
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8"))
    return rows


def _entry(row: dict[str, Any]) -> tuple[str, Any, Any]:
    default, shown = DEFAULTS.get(row["name"], (None, row["default"].strip("'").lower()))
    kind = _TYPES.get(row["type"], str)
    words = row["type"] == "words"
    own = f"{_OWNERS[row['owner']]}: {row['owner']}.{row['name']} of Megatron-Core"
    own += f" (default: {shown})" if row["name"] in DEFAULTS else f" (default there: {shown})"
    flag, aliases, text = SHARED.get(row["name"], ("", (), own))
    return (
        row["name"],
        kind if words or default is not None else kind | None,
        option(
            () if words else default,
            flag=flag,
            aliases=aliases,
            help=text,
            choices=_WORDS.get(row["name"], tuple(row["choices"])),
            metavar="NAME,..." if words else "F" if row["name"] == "moe_expert_capacity_factor" else "",
            ge=1 if row["name"].endswith("_size") and row["type"] == "int" else None,
        ),
    )


#: An option of TransformerEngine that is not a field of Megatron-Core's configurations.
_BACKWARD = (
    "backward_override",
    str,
    option(
        "dequantized",
        help="backward pass in TransformerEngine's number formats: dequantized multiplies the forward pass's dequantised operands in "
        "BF16; none quantises gradients too and is faster (default: dequantized)",
        choices=("dequantized", "none"),
    ),
)

_DOC = """The fields of Megatron-Core's configurations, and TransformerEngine's ``backward_override``. None keeps Megatron-Core's
default."""
MegatronConfig = make_dataclass(
    "MegatronConfig",
    [*(_entry(row) for row in table()), _BACKWARD],
    namespace={"__doc__": _DOC},  # else dataclasses writes one, from a signature of hundreds of fields
    frozen=True,
    kw_only=True,
)
MegatronConfig.__module__ = __name__
