"""Checks that engine, trainer and checkpoint have the same model, after the parts are built and before generation and training.

Recorded fields, weights and token ids are exchanged by index. An engine with more experts, another number of routed layers or another
vocabulary would cause errors late and far from their cause. Therefore each side reports its model with the keys of ``config.json``
(facts ``model.*``), and values reported by two sides must be equal. Unreported values are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_core.errors import CheckpointError
from miles_core.plugin.detect import model_facts
from miles_core.plugin.facts import show

if TYPE_CHECKING:
    from miles_core.contracts.run import Policy, Run

#: Keys whose values must agree. The number format of weights, draft layers and the model's name may differ.
COMPARED = ("num_experts", "top_k", "moe_layers", "layers", "hidden_size", "vocab_size")


def compare_models(run: Run, policy: Policy, trainer: Mapping[str, object], engine: Mapping[str, object]) -> None:
    """Compare the models of both sides with the checkpoint's ``config.json`` and with each other.

    Args:
        trainer, engine: reported facts (``Trainer.model_facts``, ``Engine.model_facts``).

    Raises:
        CheckpointError: two models differ; names every difference.
    """
    checkpoint = policy.hf_checkpoint or run.config.model.hf_checkpoint
    sides: dict[str, Mapping[str, Any]] = {
        # 0 experts means that config.json has no such key; the model's class may have a default
        f"--hf-checkpoint {checkpoint}": {f.name: f.value or None for f in model_facts(checkpoint)},
        f"the trainer ({run.config.run.trainer})": trainer,
        f"the engine ({run.config.run.engine})": engine,
    }
    names = list(sides)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            if found := differences(sides[first], sides[second]):
                raise CheckpointError(
                    f"{first} and {second} are different models: {', '.join(found)}; start both sides from one checkpoint"
                )


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Describe the differences, such as ``model.num_experts is 8 and 16``, of all compared keys that both sides report."""

    found = []
    for name in (f"model.{n}" for n in COMPARED):
        a, b = first.get(name), second.get(name)
        if a is not None and b is not None and a != b:
            found.append(f"{name} is {show(a)} and {show(b)}")
    return found
