"""Token ids -> text without special tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Decode = Callable[[list[int]], str]


class Detokenizer:
    """Decodes with a Transformers tokenizer; calls the Rust tokenizer directly where that gives the same text."""

    def __init__(self, tokenizer: Any) -> None:
        direct = tokenizer.is_fast and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._tokenizer = tokenizer.backend_tokenizer if direct else tokenizer
        self._direct = direct

    def __call__(self, tokens: list[int]) -> str:
        """Return the text of one response."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def batch(self, responses: Sequence[list[int]]) -> list[str]:
        """Return the text of each response; the Rust tokenizer decodes them in one call, and in parallel unless that is disabled."""
        if self._direct and len(responses) > 1:
            return list(self._tokenizer.decode_batch(list(responses), skip_special_tokens=True))
        return [self(tokens) for tokens in responses]


def decode_all(decode: Decode, responses: Sequence[list[int]]) -> list[str | Exception]:
    """Decode responses together. A response that cannot be decoded yields its error and does not affect the others."""
    if isinstance(decode, Detokenizer):
        try:
            return [*decode.batch(responses)]
        except Exception:  # decode each, to find those that fail
            pass
    return [_decode(decode, tokens) for tokens in responses]


def _decode(decode: Decode, tokens: list[int]) -> str | Exception:
    try:
        return decode(tokens)
    except Exception as error:
        return error
