"""What an engine in another program needs to know of the model: its ``config.json``, and its experts, which the program records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from miles_core.errors import CheckpointError
from miles_core.plugin.detect import config_facts, language_model
from miles_core.plugin.layers import moe_layers
from miles_core.plugin.model_config import model_config

#: Field of the experts that the engine chose; the plugin that replays them declares it.
ROUTED_EXPERTS = "rollout_routed_experts"


def language_config(checkpoint: str | Path) -> dict[str, Any]:
    """Return the language model's entries of a checkpoint's ``config.json``."""
    config = model_config(str(checkpoint))
    if config is None:
        raise CheckpointError(f"--hf-checkpoint {checkpoint}: no such directory")
    return language_model(config)


@dataclass(frozen=True)
class Routing:
    """Converts a record of routed experts to the column ``ROUTED_EXPERTS``.

    Attributes:
        dtype: dtype of the column.
        layers: number of layers of the model.
        moe_layers: indices of the MoE layers.
        top_k: experts per token.
    """

    dtype: str
    layers: int
    moe_layers: tuple[int, ...]
    top_k: int

    @classmethod
    def of(cls, config: Mapping[str, Any], dtype: str) -> Routing | None:
        """Return the conversion for a model with these entries of ``config.json``; None if it has no experts."""
        layers = moe_layers(config)
        if not layers:
            return None
        facts = {f.name: f.value for f in config_facts(config)}
        return cls(dtype, int(facts["model.layers"]), layers, int(facts["model.top_k"] or 0))

    def column(self, routes: NDArray[Any]) -> NDArray[Any]:
        """Return a record of all layers or of the MoE layers, also flattened, as [tokens - 1, MoE layers, top_k].

        Args:
            routes: [tokens - 1, layers, top_k], flat if it contains all layers.
        """
        record = routes if routes.ndim == 3 else routes.reshape(-1, self.layers, self.top_k)
        if record.shape[1] == self.layers > len(self.moe_layers):
            record = record[:, list(self.moe_layers)]
        return record.astype(self.dtype)
