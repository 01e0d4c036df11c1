"""Loads the tokenizer of a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles_core.errors import CheckpointError, ConfigError, first_line


def load_tokenizer(path: str | None, trust_remote_code: bool = False) -> Any:
    """Load the checkpoint's tokenizer; CheckpointError if there is none or it has no end-of-sequence token."""
    from transformers import AutoTokenizer

    if not path:
        raise ConfigError("no model: give --hf-checkpoint DIR (a Hugging Face checkpoint)")
    if not Path(path).is_dir():
        raise CheckpointError(f"--hf-checkpoint {path}: no such directory; give a local Hugging Face checkpoint")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # Transformers also reads and validates config.json here
        raise CheckpointError(
            f"--hf-checkpoint {path}: its tokenizer cannot be loaded ({first_line(error)})"
        ) from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise CheckpointError(f"--hf-checkpoint {path}: there is no tokenizer in it; copy tokenizer.json there")
    if tokenizer.eos_token_id is None:
        raise CheckpointError(
            f"--hf-checkpoint {path}: its tokenizer has no end-of-sequence token; set eos_token there"
        )
    return tokenizer
