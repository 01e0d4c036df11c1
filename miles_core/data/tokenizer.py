"""Loads the tokenizer of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles_core.errors import CheckpointError, ConfigError, first_line
from miles_core.text import valid_text


def load_tokenizer(path: str | None, trust_remote_code: bool = False) -> Any:
    """Load the checkpoint's tokenizer; CheckpointError if there is none or it has no end-of-sequence token.

    It accepts every ``str``: text of users' functions, which pass their own text to it, is made valid (``valid_text``)."""
    from transformers import AutoTokenizer

    if not path:
        raise ConfigError("no model: give --hf-checkpoint DIR (a Hugging Face checkpoint)")
    if not Path(path).is_dir():
        raise CheckpointError(f"--hf-checkpoint {path}: no such directory; give a local Hugging Face checkpoint")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
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
    if hasattr(tokenizer, "_encode_plus"):
        tokenizer._encode_plus = _EncodeValid(tokenizer._encode_plus)
    return tokenizer


class _EncodeValid:
    """Replaces the method of a Transformers tokenizer that ``encode``, ``tokenize`` and ``__call__`` use. It is an attribute of the object,
    because a subclass would change the name of the class that ``save_pretrained`` writes."""

    def __init__(self, encode: Callable[..., Any]) -> None:
        self.encode = encode

    def __call__(self, text: Any, text_pair: Any = None, **options: Any) -> Any:
        return self.encode(text=_valid_input(text), text_pair=_valid_input(text_pair), **options)


def _valid_input(text: Any) -> Any:
    """Make a text, or all texts of a batch, valid; lists remain lists and tuples remain tuples."""
    if isinstance(text, str):
        return valid_text(text)
    return type(text)(map(_valid_input, text)) if isinstance(text, list | tuple) else text
