"""An adapter as SGLang 0.5.17 loads it, from peft's files.

peft stores the adapters of joined experts as one pair of matrices per parameter, A [experts * rank, in] and B [out, rank * experts] with the
expert as the fastest index, under names that tell parameters of one module apart by their depth. SGLang loads a pair per expert, under names
with the expert's number (``srt/lora/mem_pool.py``), and adds them inside its layer of experts (``FusedMoEWithLoRA``). It scales every
adapter by alpha / rank, and does not read ``use_rslora``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from miles_core.plugin import MilesError

#: ``--lora-target-modules`` of all joined experts.
ALL_EXPERTS = "all-experts"
#: Parameters of joined experts that SGLang adapts, as Transformers names them; SGLang uses the same names for its layers.
EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")


def names_experts(targets: Iterable[str], moe: bool) -> bool:
    """Whether ``--lora-target-modules`` selects joined experts.

    Args:
        targets: the names.
        moe: whether the model is a mixture of experts, whose experts have bare names, too.
    """
    return any("expert" in name or (moe and name in EXPERT_PARAMETERS) for name in targets)


def convert(config: Mapping[str, Any], tensors: bytes) -> tuple[dict[str, Any], bytes]:
    """Return peft's configuration and tensors (a safetensors file) of an adapter as SGLang loads them.

    Raises:
        MilesError: SGLang has no adapters of these parameters.
    """
    changed = dict(config)
    if config.get("use_rslora"):
        changed |= {"use_rslora": False, "lora_alpha": config["lora_alpha"] * math.sqrt(config["r"])}
    joined = [name.rpartition(".")[2] for name in config.get("target_parameters") or ()]
    joined = list(dict.fromkeys(joined))
    if not joined:
        return changed, tensors
    if unknown := [name for name in joined if name not in EXPERT_PARAMETERS]:
        raise MilesError(
            f"SGLang 0.5.17 has adapters of the experts' {' and '.join(EXPERT_PARAMETERS)} only, and this adapter has one of {unknown[0]}; "
            "leave it out of --lora-target-modules, or use --lora-sync merged"
        )
    changed |= {"target_parameters": None, "target_modules": [*config["target_modules"], *joined]}
    return changed, _split(tensors, joined, int(config["r"]))


def _split(tensors: bytes, joined: list[str], rank: int) -> bytes:
    """Replace each pair of matrices of joined experts by one per expert."""
    from safetensors.torch import load, save

    found = {}
    for name, matrix in load(tensors).items():
        path, letter = name.removesuffix(".weight").rsplit(".lora_", 1)
        module = path
        while module.endswith(".base_layer"):
            module = module.removesuffix(".base_layer")
        if not module.endswith("experts"):
            found[name] = matrix
            continue
        parameter = joined[len(joined) - 1 - path.count(".base_layer")]  # the outermost wrapper is that of the last one
        if letter == "A":
            each = matrix.view(-1, rank, matrix.shape[1])
        else:
            each = matrix.view(len(matrix), rank, -1).permute(2, 0, 1)
        for expert, own in enumerate(each):
            found[f"{module}.{expert}.{parameter}.lora_{letter}.weight"] = own.contiguous()
    return save(found)
