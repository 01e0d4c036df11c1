"""A mixture of experts out of a dense Llama checkpoint, in the layout of Qwen2-MoE: what ``learning.py`` trains with r3.

Every expert is the dense MLP with a little noise, routers are random, and the shared expert adds nothing, so that the model answers
about as the dense one does while its routing matters (sparse upcycling, arXiv 2212.05055, section 2).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EXPERTS, TOP, SHARED = 8, 2, 256
NOISE = 0.05  # of a weight's own size
_BIASED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")


def upcycle(source: Path, target: Path) -> Path:
    """Write the mixture of ``source`` (one model.safetensors) to ``target``, with its tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    config, found = json.loads((source / "config.json").read_text()), {}
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, weight in load_file(source / "model.safetensors").items():
        if ".mlp." in name:
            layer, part = name.split(".mlp.")
            size = weight.to(device).float()
            for e in range(EXPERTS):
                noisy = size * (1 + NOISE * torch.randn(size.shape, device=device))
                found[f"{layer}.mlp.experts.{e}.{part}"] = noisy.bfloat16().cpu()
            continue
        found[name] = weight
        if name.endswith(_BIASED):
            found[name.removesuffix("weight") + "bias"] = torch.zeros(len(weight), dtype=weight.dtype)
    for layer in range(config["num_hidden_layers"]):
        found |= _routing(f"model.layers.{layer}.mlp.", config["hidden_size"])
    found.setdefault("lm_head.weight", found["model.embed_tokens.weight"].clone())
    save_file(found, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(_config(config), indent=1))
    for file in source.iterdir():
        if "token" in file.name or file.name in ("chat_template.jinja", "generation_config.json"):
            shutil.copy(file, target)
    return target


def _routing(prefix: str, hidden: int) -> dict[str, torch.Tensor]:
    def small(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * 0.02).bfloat16()

    return {
        f"{prefix}gate.weight": small(EXPERTS, hidden),
        f"{prefix}shared_expert_gate.weight": small(1, hidden),
        f"{prefix}shared_expert.gate_proj.weight": small(SHARED, hidden),
        f"{prefix}shared_expert.up_proj.weight": small(SHARED, hidden),
        f"{prefix}shared_expert.down_proj.weight": torch.zeros(hidden, SHARED).bfloat16(),
    }


def _config(dense: dict[str, object]) -> dict[str, object]:
    own = {"num_experts": EXPERTS, "num_experts_per_tok": TOP, "moe_intermediate_size": dense["intermediate_size"]}
    own |= {
        "shared_expert_intermediate_size": SHARED,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    left = (
        "model_type",
        "architectures",
        "tie_word_embeddings",
        "head_dim",
        "mlp_bias",
        "attention_bias",
        "pretraining_tp",
    )
    kept = {k: v for k, v in dense.items() if k not in left}
    named = {"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "tie_word_embeddings": False}
    return kept | own | named | {"use_sliding_window": False, "max_window_layers": dense["num_hidden_layers"]}
