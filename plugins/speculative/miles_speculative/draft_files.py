"""Checks from its files whether a draft fits a policy, without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from miles_core.plugin import NO_MIXER, STATE_KINDS, CheckpointError
from miles_speculative.vocabulary import difference


def is_eagle(path: str | Path) -> bool:
    """Whether a directory contains an EAGLE head: it has the tensor ``fc.weight``, or no safetensors but torch ``*.bin`` files."""
    names = tensor_names(Path(path))
    return "fc.weight" in names or (not names and any(Path(path).glob("*.bin")))


def misfits(path: str | Path, checkpoint: str | Path, trust_remote_code: bool = False) -> Iterator[str]:
    """Yield a message for each reason why the draft in ``path`` does not fit the policy in ``checkpoint``.

    ``checkpoint`` must have a readable configuration. Tokenizers are loaded, with ``trust_remote_code``, only if everything else fits."""
    flag = f"--draft-model-path {path}"
    config = read_config(path)
    if config is None:
        yield f"{flag}: it has no config.json, so it is not a Hugging Face checkpoint"
        return
    theirs = read_config(checkpoint)
    assert theirs is not None
    if config.get("vocab_size") != theirs.get("vocab_size"):
        yield (
            f"{flag}: its vocabulary has {config.get('vocab_size')} tokens and the policy's {theirs.get('vocab_size')}; a draft needs "
            "the policy's tokenizer"
        )
        return
    try:
        names = tensor_names(Path(path))
    except CheckpointError as error:
        yield f"{flag}: {error}"
        return
    if is_eagle(path):
        if any(name.startswith("midlayer.") for name in names):
            yield (
                f"{flag}: it is an EAGLE-3 head, which uses hidden states of several layers; give an EAGLE or EAGLE-2 head, or create "
                "one: miles convert --eagle-num-layers 1"
            )
        elif config.get("hidden_size") != theirs.get("hidden_size"):
            yield (
                f"{flag}: its hidden size is {config.get('hidden_size')} and the policy's {theirs.get('hidden_size')}; the head was "
                "trained for another model"
            )
        return
    weights = [sum(f.stat().st_size for f in Path(p).glob("*.safetensors")) for p in (path, checkpoint)]
    if weights[0] >= weights[1]:
        yield (
            f"{flag}: its weights have {weights[0] / 1e6:.0f} MB and the policy's {weights[1] / 1e6:.0f} MB; use a draft of a quarter "
            "to a tenth of the policy's size"
        )
        return
    try:
        other = difference(path, checkpoint, trust_remote_code)
    except CheckpointError as error:
        yield f"{flag}: {error}"
        return
    if other is not None:
        yield f"{flag}: its tokenizer differs ({other}); a draft needs the policy's tokenizer"


def read_config(path: str | Path) -> dict[str, Any] | None:
    """Return the configuration of a checkpoint's text model; None if it cannot be read."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found: dict[str, Any] = config.get("text_config") or config
    return found


def has_windows(config: Mapping[str, Any]) -> bool:
    """Whether a configuration has layers that attend to fewer than all previous tokens."""
    text = config.get("text_config") or config
    kinds = set(text.get("layer_types") or ()) - {"full_attention", *STATE_KINDS, *NO_MIXER}
    return bool(kinds) or bool(text.get("sliding_window") and text.get("use_sliding_window", True))


def tensor_names(path: Path) -> set[str]:
    """Return the tensor names in a directory's safetensors files. Raises CheckpointError for a damaged file."""
    found: set[str] = set()
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, "np") as opened:
                found.update(opened.keys())
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file.name} is damaged or truncated ({error}); copy it again") from error
    return found
