"""Do engine, trainer and checkpoint mean one model? Asked when the parts exist, before anything is generated or trained.

Records, weights and token ids travel between the two sides by position: an engine with more experts, another number of
routed layers or another vocabulary is found late and far from its cause. So each side says what it runs, in the words of
``config.json`` (facts ``model.*``), and what two of them say must be equal. A side that says nothing is not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from miles_core.errors import CheckpointError
from miles_core.plugin.detect import model_facts
from miles_core.plugin.facts import show

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.policy import Policy
    from miles_core.contracts.run import Run
    from miles_core.contracts.trainer import Trainer

#: What must agree. The number format of the weights and draft layers may differ, and a name is only a name.
COMPARED = ("num_experts", "top_k", "moe_layers", "layers", "hidden_size", "vocab_size")


def check_same_model(run: Run, policy: Policy, trainer: Trainer, engine: Engine) -> None:
    """``compare_models`` of a trainer and an engine (started) in this process."""
    compare_models(run, policy, trainer.model_facts(), engine.model_facts())


def compare_models(run: Run, policy: Policy, trainer: Mapping[str, object], engine: Mapping[str, object]) -> None:
    """Hold the model of both sides against the checkpoint's ``config.json`` and against each other.

    Args:
        trainer, engine: what each said of its model (``Trainer.model_facts``, ``Engine.model_facts``).

    Raises:
        CheckpointError: two of them differ; names every difference.
    """
    checkpoint = policy.hf_checkpoint or run.config.model.hf_checkpoint
    sides: dict[str, Mapping[str, Any]] = {
        # 0 experts means that no key says so; the model's class may have a default
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
    """``model.num_experts is 8 and 16`` for everything compared that both know."""
    found = []
    for name in (f"model.{n}" for n in COMPARED):
        a, b = first.get(name), second.get(name)
        if a is not None and b is not None and a != b:
            found.append(f"{name} is {show(a)} and {show(b)}")
    return found
