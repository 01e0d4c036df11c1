"""Creates a small Qwen3-MoE checkpoint with a byte-level tokenizer from a seed.

The tokenizer's vocabulary is the 256 bytes and three special tokens, so any text can be encoded and one ASCII character
is one token. The weights are random; ``miles_tools.demo`` trains them, tests and benchmarks use them as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.data.transformers_import import import_transformers

PAD = "<|pad|>"
START = "<|start|>"
END = "<|end|>"

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    + START
    + "{{ message.role }}: {{ message.content }}"
    + END
    + "{%- endfor -%}{%- if add_generation_prompt -%}"
    + START
    + "assistant: {% endif -%}"
)


@dataclass(frozen=True)
class Size:
    """Shape of the model; the default has 0.24 M parameters."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    experts_per_token: int = 2
    expert_hidden: int = 64
    context: int = 512
    init_std: float = 0.1


#: The shape on a GPU, where a wider model with more heads takes no longer and learns addition in fewer steps: 0.59 M parameters.
ON_A_GPU = Size(hidden=128, heads=8, kv_heads=8)

#: The shape ``benchmarks/`` uses: 1.8 M parameters.
BENCHMARK = Size(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, expert_hidden=128, init_std=0.02)


def make_tokenizer() -> Any:
    """A byte-level ``PreTrainedTokenizerFast`` with end, padding and chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    import_transformers()
    from transformers import PreTrainedTokenizerFast

    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), PAD, START, END]
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_checkpoint(directory: str | Path, seed: int = 0, size: Size | None = None, dtype: str = "float32") -> int:
    """Write config, random safetensors weights and tokenizer into ``directory`` (made if absent).

    Args:
        directory: target directory; existing files of the same names are overwritten.
        seed: seed of the weights; the caller's random state is unchanged.
        size: shape of the model.
        dtype: stored dtype, ``float32`` or ``bfloat16``.

    Returns:
        The number of parameters.
    """
    import torch

    import_transformers()
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, logging

    logging.disable_progress_bar()
    size = size or Size()
    tokenizer = make_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden,
        intermediate_size=size.expert_hidden * size.experts_per_token,
        moe_intermediate_size=size.expert_hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,  # type: ignore[call-arg]
        num_experts=size.experts,
        num_experts_per_tok=size.experts_per_token,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=size.context,
        tie_word_embeddings=False,
        initializer_range=size.init_std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).to(getattr(torch, dtype))
    model.config.dtype = dtype
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return sum(p.numel() for p in model.parameters())
