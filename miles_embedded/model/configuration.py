"""What every Transformers model has, and its type does not say: a configuration and a head."""

from __future__ import annotations

from typing import Any


def configuration(model: Any) -> Any:
    """What the model was built from."""
    return model.config


def text_configuration(model: Any) -> Any:
    """The part that describes the language model, where there are others."""
    return configuration(model).get_text_config()


def head(model: Any) -> Any:
    """``lm_head``, whatever the family calls it."""
    return model.get_output_embeddings()
