"""Parameters of SGLang's model that updates do not write, and the output layer of tied checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

#: Name suffixes of parameters that SGLang sets itself: the scales of cached keys and values.
_CONSTANTS = (".k_scale", ".v_scale")
#: SGLang's class -> name suffixes of parameters that it creates and does not use (0.5.17).
_UNUSED = {"FalconH1ForCausalLM": (".q_norm.weight", ".k_norm.weight")}
_EMBEDDING = re.compile(r"^(?:\w+\.)*?(?:embed_tokens|word_embeddings|tok_embeddings|wte)\.weight$")
#: The checkpoint's name of the output layer.
HEAD = "lm_head.weight"


def ignored_parameters(model: Any) -> tuple[str, ...]:
    """Return name suffixes of the constants of SGLang's model, and of parameters that it does not use."""
    return (*_CONSTANTS, *_UNUSED.get(type(model).__name__, ()))


def tied_head(model: Any, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Return the embedding under the name of the output layer if the checkpoint ties the two and SGLang's model has both.

    Args:
        model: SGLang's model.
        tensors: part of an update, under the checkpoint's names.

    Returns:
        the tensors to load in addition: one or none.
    """
    names = {name for name, _ in tensors}
    embedding = next(((name, t) for name, t in tensors if _EMBEDDING.match(name) and ".layers." not in name), None)
    if embedding is None or HEAD in names or not _ties(model):
        return []
    # named_parameters lists a shared parameter once, as the embedding
    own = [name for name, _ in model.named_parameters() if name.endswith(HEAD)]
    return [(HEAD, embedding[1])] if own else []


def _ties(model: Any) -> bool:
    """Whether the model's configuration ties the output layer to the embedding."""
    config = getattr(model, "config", None)
    configs = (config, getattr(config, "text_config", None))
    return any(bool(getattr(each, "tie_word_embeddings", False)) for each in configs if each is not None)
