"""Tiny random checkpoints of model families, in the Hugging Face layout, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}

_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
_GROUPED: dict[str, Any] = {
    **_MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
# With many heads no two keys get equal scores; with few, the score is 0 for keys without a positive head.
_INDEXER: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 5}

#: family -> (name of the configuration class, its arguments). Windows and indexer choices are shorter than the tests' sequences.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_COMMON, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**_COMMON, "head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {**_COMMON, **_MOE, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True}),
    "deepseek_v3": ("DeepseekV3Config", {**_COMMON, **_GROUPED, **_LATENT}),
    "deepseek_v32": ("DeepseekV32Config", {**_COMMON, **_GROUPED, **_LATENT, **_INDEXER}),
    "gpt_oss": (
        "GptOssConfig",
        {**_COMMON, **_LOCAL_EXPERTS, "head_dim": 16, "sliding_window": 5, "rope_parameters": _YARN},
    ),
}

#: Further families, which differ from these in their routers.
ROUTER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm4_moe": ("Glm4MoeConfig", {**_COMMON, **_GROUPED, "n_routed_experts": 8, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**_COMMON, **_LOCAL_EXPERTS, "head_dim": 16}),
    # both entries: SGLang reads the first, and releases of Transformers before 5.13 only the second
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            **_COMMON,
            **_LOCAL_EXPERTS,
            "head_dim": 16,
            "rotary_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "granitemoe": ("GraniteMoeConfig", {**_COMMON, **_LOCAL_EXPERTS, "logits_scaling": 4.0}),
    "llama4": (
        "Llama4TextConfig",
        {
            **_COMMON,
            **_LOCAL_EXPERTS,
            "head_dim": 16,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": 6,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "no_rope_layers": [1, 0],
            "moe_layers": [0, 1],
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **_COMMON,
            "head_dim": 16,
            "global_head_dim": 16,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def tiny_tokenizer() -> Any:
    """Make a tokenizer with 64 ids: padding 0, end 1, then one printable character per id."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<end>", *(chr(ord(" ") + i) for i in range(62))]
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def tiny_checkpoint(family: str, directory: str | Path, seed: int = 0, **changes: Any) -> Path:
    """Save a random model of ``family`` with ``tiny_tokenizer`` to ``directory``; ``changes`` override configuration entries.

    Weights are larger than usual initial weights, so that tokens have clearly different probabilities.

    Returns:
        the directory.
    """
    import transformers

    name, values = (FAMILIES | ROUTER_FAMILIES)[family]
    return random_checkpoint(getattr(transformers, name)(**{**values, **changes}), directory, seed)


def random_checkpoint(config: Any, directory: str | Path, seed: int = 0, biases: float = 0.0) -> Path:
    """Save a random model with this Transformers configuration, like ``tiny_checkpoint``.

    Args:
        config: the configuration.
        directory: where to save.
        seed: of the weights.
        biases: standard deviation of biases, of those that correct a router, and of the factors of norms around their initial values.
    """
    import torch
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        logging,
    )

    logging.disable_progress_bar()
    towers = config.get_text_config() is not config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    listed = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto: Any = AutoModelForImageTextToText if towers and listed else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=2.0 / parameter.shape[-1] ** 0.5)
                elif name.endswith("sinks"):
                    parameter.normal_()
                elif biases:
                    parameter.add_(torch.randn_like(parameter), alpha=biases)
            for name, buffer in model.named_buffers():
                if biases and name.endswith("correction_bias"):
                    buffer.normal_(std=biases)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return Path(directory)
