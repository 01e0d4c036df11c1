"""Random BF16 checkpoints of the sizes that the pages quote, with a tokenizer of one word an id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, dict[str, Any]] = {
    "dense": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12},
    "moe": {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16},
    # Qwen3-8B but for its vocabulary
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    # as many of its layers as several trainers of one process hold
    "8b-layers": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-4b": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
    },
    # some layers of Qwen3-30B-A3B
    "30b-layers": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "vocab_size": 8192,
    },
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
    "tiny_dense": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
    # Qwen3-Next: full attention in every fourth layer, a gated delta net in the others
    "hybrid": {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16},
    "tiny_hybrid": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2},
}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True}
DELTA_NET = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 512,
}
VOCABULARY = 32000


def make_model(kind: str, directory: Path) -> Path:
    """A random checkpoint with a tokenizer of one word an id."""
    import transformers

    common = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 1}
    common |= {
        "head_dim": 64 if kind.startswith("tiny") else 128,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **SIZES[kind],
    }
    if kind in ("dense", "8b", "8b-layers", "tiny_dense") or kind.startswith("qwen3-"):
        config = transformers.Qwen3Config(**common, pad_token_id=0)
    elif kind in ("hybrid", "tiny_hybrid"):
        config = transformers.Qwen3NextConfig(**(EXPERTS | common), **DELTA_NET, pad_token_id=0)
    else:
        config = transformers.Qwen3MoeConfig(**(EXPERTS | common), pad_token_id=0)
    return save_random(config, directory)


def save_random(config: Any, directory: Path) -> Path:
    """Save a checkpoint with random BF16 weights, and a tokenizer of words; return its directory."""
    import transformers

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    restore_interval(directory)
    word_tokenizer(config.vocab_size).save_pretrained(directory)
    return directory


def restore_interval(directory: Path) -> None:
    """Write the interval of full attention, which published checkpoints have, SGLang reads and Transformers does not write."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if "linear_attention" in config.get("layer_types", ()):
        path.write_text(
            json.dumps({**config, "full_attention_interval": config["layer_types"].index("full_attention") + 1})
        )


def word_tokenizer(vocabulary: int = VOCABULARY) -> Any:
    """Of the words w2, w3, ... behind two special ones: one an id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, vocabulary))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
