"""The tokens of a checkpoint's tokenizer, and whether two checkpoints have the same ones."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from miles_core.plugin import CheckpointError


def difference(path: str | Path, checkpoint: str | Path, trust_remote_code: bool = False) -> str | None:
    """How the tokenizer in ``path`` gives its tokens other ids than that in ``checkpoint``, as half a sentence; None where it does not. The
    form of the files does not matter, and neither does which token ends a text.

    Raises:
        CheckpointError: one of them has no tokenizer that can be read.
    """
    if _files(path) == _files(checkpoint) != {}:
        return None
    own, theirs = (vocabulary(each, trust_remote_code) for each in (path, checkpoint))
    apart = own.items() ^ theirs.items()
    if not apart:
        return None
    first, _ = min(apart, key=lambda entry: (entry[1], entry[0]))
    said = [f"has the number {found[first]}" if first in found else "does not exist" for found in (own, theirs)]
    return f"{len(apart)} entries differ, the first is {first!r}, which {said[0]} there and {said[1]} in the policy's"


def vocabulary(path: str | Path, trust_remote_code: bool = False) -> dict[str, int]:
    """Tokens and their ids, special and added ones too; CheckpointError where there is no tokenizer that can be read."""
    return _loaded(str(path), trust_remote_code, tuple(sorted(_files(path).items())))


@lru_cache(maxsize=8)  # a plan that is refused is reviewed many times, and loading a tokenizer takes a second
def _loaded(path: str, trust_remote_code: bool, files: tuple[tuple[str, bytes], ...]) -> dict[str, int]:
    """The same, of directory and files as they are now."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # what a damaged file raises is of this class itself
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded ({first})") from error
    found: dict[str, int] = tokenizer.get_vocab()
    if not found.keys() - set(tokenizer.all_special_tokens):
        raise CheckpointError(f"there is no tokenizer in {path}; copy the files of the one it was trained with there")
    return found


def _files(path: str | Path) -> dict[str, bytes]:
    """The files that tokenizers are kept in, by name."""
    kinds = ("*token*.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken")
    return {file.name: file.read_bytes() for kind in kinds for file in Path(path).glob(kind)}
