"""Which models have layers with windows, and the mask that a model needs."""

from __future__ import annotations

from torch import Tensor, nn

from miles_core.plugin.layers import NO_MIXER, STATE_KINDS
from miles_embedded.model.attention import window_mask
from miles_embedded.model.parts import text_configuration


def has_windows(model: nn.Module) -> bool:
    """Whether some layer may attend to fewer than all previous tokens."""
    attends = _layer_types(model) - {"full_attention", *STATE_KINDS, *NO_MIXER}
    return bool(getattr(text_configuration(model), "sliding_window", None)) or bool(attends)


def _layer_types(model: nn.Module) -> set[str]:
    return set(getattr(text_configuration(model), "layer_types", None) or ())


def mask_for(model: nn.Module) -> Tensor | None:
    """Return the mask to pass to ``model``, which reads none.

    Without one, Transformers builds masks, for which it first searches for packed sequences: several small operations per call, which
    cost time in a CPU decode step and wait for a GPU. Models without windowed layers need no masks. None lets the model build them, as
    models whose layers keep a state do, because these layers read a mask as padding.
    """
    return None if has_windows(model) or _layer_types(model) & STATE_KINDS else window_mask(0)
