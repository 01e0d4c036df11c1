"""Hooks: find the parameters that Muon leaves to AdamW."""

from __future__ import annotations

from torch import nn

from miles_core.plugin import Policy, Run, hookimpl
from miles_optimizers.config import OptimizersConfig
from miles_optimizers.muon import OTHERS, find_embeddings


class Optimizers:
    """Records the names of embeddings and output layer before a trainer shards the model."""

    def __init__(self, options: OptimizersConfig) -> None:
        pass

    @hookimpl
    def on_model(self, run: Run, policy: Policy, model: nn.Module, role: str) -> None:
        if role in ("train", "shared", "critic"):
            run.state.setdefault(OTHERS, {})[policy.name] = find_embeddings(model)
