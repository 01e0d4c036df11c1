"""A sequence classifier with one label, as Transformers stores it: the score head on a causal language model, and its export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from miles_core.data import WeightUnit
from miles_core.plugin import ConfigError, Policy, Run
from miles_core.trainer import CheckpointFiles
from miles_embedded import VALUE_HEAD, add_value_head, head, text_configuration

#: Name of the head's weight in a checkpoint of a classifier.
SCORE = "score.weight"


def make_classifier(run: Run, policy: Policy, model: nn.Module) -> None:
    """Put a score head in place of the output layer of ``model``. It has the weight of a checkpoint that is such a classifier, or 0.

    Raises:
        ConfigError: Transformers has no classifier of the model's family, or the checkpoint's has several labels.
    """
    config: Any = model.config
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    path = _checkpoint(run, policy)
    if kind is None or text_configuration(model) is not config:
        raise ConfigError(
            f"--advantage-estimator reward_model: Transformers has no text classifier with the layers of {type(model).__name__} "
            f"({path}), so its reward model could not be loaded; choose a text model of another family"
        )
    like = next(model.parameters())
    made = nn.Linear(config.hidden_size, 1, bias=False, device=like.device, dtype=like.dtype)
    weight = _read_score(path)
    if weight is not None and weight.shape != made.weight.shape:
        raise ConfigError(
            f"{path}: its {SCORE} is {list(weight.shape)}, and a reward model has one label: {list(made.weight.shape)}; start from another "
            "checkpoint"
        )
    with torch.no_grad():
        made.weight.zero_() if weight is None else made.weight.copy_(weight)
    add_value_head(model, made, alone=True)
    config.architectures, config.num_labels = [kind.__name__], 1
    # A classifier reads the last token that is not padding, so padding with the end token would hide the end of a text.
    pad = run.tokenizer.pad_token_id
    config.pad_token_id = None if pad == run.tokenizer.eos_token_id else pad


def output_name(model: nn.Module) -> str:
    """Return the name of the output layer's weight in the model."""
    layer = head(model)
    return next(f"{name}.weight" for name, module in model.named_modules() if module is layer)


def as_classifier(units: Iterator[WeightUnit], output: str) -> Iterator[WeightUnit]:
    """Yield the tensors of an exported classifier: without the output layer's, and the head's under its name there."""
    own = f"{VALUE_HEAD}.weight"
    for unit in units:
        tensors = {SCORE if name == own else name: t for name, t in unit.tensors.items() if name != output}
        if tensors:
            yield replace(unit, tensors=tensors)


def _checkpoint(run: Run, policy: Policy) -> Path:
    options = run.config_of(policy).model
    return Path(options.ref_load or policy.hf_checkpoint or options.hf_checkpoint or "")


def _read_score(path: Path) -> torch.Tensor | None:
    files = CheckpointFiles(path, "--hf-checkpoint")
    return files.read(SCORE) if SCORE in files.entries else None
