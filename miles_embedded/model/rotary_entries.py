"""Rotary entries of a ``config.json`` that some Transformers releases ignore without a message.

Two are known. Releases before 5.13 rotate whole heads of MiniMax-M2, whose authors' files give the rotated part as ``rotary_dim``. Releases
whose class has one rotary embedding for all layers (OLMo 3 before 5.13) ignore parameters per layer type and use the default base.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_core.errors import CheckpointError


def complete_rotary(config: Any) -> None:
    """Add ``partial_rotary_factor`` to configurations that define it only through ``rotary_dim``.

    Args:
        config: a Transformers configuration; changed in place.

    Raises:
        CheckpointError: the configuration has rotary parameters per layer type, and its class reads one set for all layers.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None)
    if not isinstance(rope, Mapping):
        return
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        if "rope_type" in rope:  # added by a class that expects one set of parameters
            import transformers

            raise CheckpointError(
                f"rope_parameters in config.json has entries per layer type ({', '.join(nested)}), and {type(text).__name__} of the "
                f"installed Transformers {transformers.__version__} reads one entry for all layers; install a newer release"
            )
    elif text.model_type == "minimax_m2" and getattr(text, "rotary_dim", None) and "partial_rotary_factor" not in rope:
        text.rope_parameters = {**rope, "partial_rotary_factor": text.rotary_dim / text.head_dim}
