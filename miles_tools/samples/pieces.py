"""Texts of single tokens."""

from __future__ import annotations

from typing import Any

import numpy as np


class Pieces(dict[int, str]):
    """Token id -> text. A token that is a part of a character is shown as one replacement character.

    Args:
        tokenizer: looks up texts; None in a process that receives them.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._known = np.zeros(0, bool)

    def add(self, tokens: np.ndarray) -> None:
        """Look up the texts of all ``tokens``, int32 [n] of at least 0."""
        for token in self.take_unknown(tokens):
            self[token] = self._describe(token)

    def take_unknown(self, tokens: np.ndarray) -> list[int]:
        """Return those of ``tokens``, int32 [n] of at least 0, that no earlier call contained, each once. The caller adds their texts."""
        if len(tokens) and (largest := int(tokens.max())) >= len(self._known):
            self._known = np.append(self._known, np.zeros(largest + 1 - len(self._known), bool))
        unknown = list(dict.fromkeys(tokens[~self._known[tokens]].tolist()))
        self._known[tokens] = True
        return unknown

    def _describe(self, token: int) -> str:
        name = self.tokenizer.convert_ids_to_tokens(token)
        text = str(self.tokenizer.decode([token]))
        # SentencePiece marks a leading space, but decoding a single token drops it
        return f" {text}" if str(name).startswith("\u2581") and not text.startswith(" ") else text
