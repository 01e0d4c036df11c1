"""Memory of a trainer with experts in host memory on one GPU, for the plan. Does not import torch.

Per expert parameter the device holds the FP32 gradient during an optimizer step, and nothing else between uses. During a pass it holds
the weights of two layers' experts, which are counted with the activations: they are gone when the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from miles_core.plugin import Facts, Usage
from miles_embedded import size_of, trainer_usage, training_of


def usage(facts: Facts, model: Mapping[str, Any]) -> Iterator[Usage]:
    """See ``miles_core.plugin.Plugin.memory``: the trainer, if it offloads experts."""
    size = size_of(facts, model)
    wanted = facts.value("experts.offload") and facts.value("trainer") == "embedded"
    if size is None or not wanted or facts.value("model.device") == "cpu":
        return
    how, plain = training_of(facts), trainer_usage(facts, size)
    experts, parts = size.experts, plain.parts
    layer = 2 * how.width * experts / max(size.sparse_layers, 1)
    kept = replace(
        parts,
        weights=parts.weights - (2 if how.reference else 1) * how.width * experts,
        optimizer=parts.optimizer - (12 if how.width == 2 else 8) * experts,
        # gradients of experts exist on the device when activations do not
        gradients=4.0 * (size.parameters - experts),
        activations=max(parts.activations + layer, 4.0 * experts),
    )
    note = f"{plain.note}; {experts / 1e9:,.3g} billion expert parameters live in host memory (--offload-experts)"
    yield replace(plain, parts=kept, note=note, replaces=True, fitting=lambda budget, alone: ())
