"""Typed access to the configuration and the head of a Transformers model."""

from __future__ import annotations

from typing import Any


def configuration(model: Any) -> Any:
    """Configuration that the model was built from."""
    return model.config


def text_configuration(model: Any) -> Any:
    """Configuration of the language model; of a text-only model its whole configuration."""
    return configuration(model).get_text_config()


def head(model: Any) -> Any:
    """Output layer (``lm_head``), independent of its name in the family."""
    return model.get_output_embeddings()
