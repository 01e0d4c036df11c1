"""Compares the vocabularies of two checkpoints' tokenizers."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from miles_core.plugin import CheckpointError


def difference(path: str | Path, checkpoint: str | Path, trust_remote_code: bool = False) -> str | None:
    """Describe how the vocabularies of two tokenizers differ; None if they are equal.

    Only tokens and their ids are compared, not the file format or the EOS token.

    Raises:
        CheckpointError: a tokenizer is missing or cannot be read.
    """
    if _files(path) == _files(checkpoint) != {}:
        return None
    own, theirs = (vocabulary(each, trust_remote_code) for each in (path, checkpoint))
    apart = own.items() ^ theirs.items()
    if not apart:
        return None
    first, _ = min(apart, key=lambda entry: (entry[1], entry[0]))
    states = [f"has the id {found[first]}" if first in found else "does not exist" for found in (own, theirs)]
    return (
        f"{len(apart)} entries differ, the first is {first!r}, which {states[0]} there and {states[1]} in the policy's"
    )


def vocabulary(path: str | Path, trust_remote_code: bool = False) -> dict[str, int]:
    """Return token -> id, including special and added tokens. Raises CheckpointError if there is no readable tokenizer."""
    return _load_vocabulary(str(path), trust_remote_code, tuple(sorted(_files(path).items())))


@lru_cache(maxsize=8)  # a rejected plan is reviewed many times, and loading a tokenizer takes a second
def _load_vocabulary(path: str, trust_remote_code: bool, files: tuple[tuple[str, bytes], ...]) -> dict[str, int]:
    """Load the vocabulary; ``files`` is part of the cache key."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # damaged files raise plain Exception
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded ({first})") from error
    found: dict[str, int] = tokenizer.get_vocab()
    if not found.keys() - set(tokenizer.all_special_tokens):
        raise CheckpointError(
            f"there is no tokenizer in {path}; copy the tokenizer files of its original checkpoint there"
        )
    return found


def _files(path: str | Path) -> dict[str, bytes]:
    """Return name -> content of the tokenizer files in a directory."""
    kinds = ("*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken")
    return {file.name: file.read_bytes() for kind in kinds for file in Path(path).glob(kind)}
