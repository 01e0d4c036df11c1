"""Options of the plugin."""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A reward model as the reward of a run."""

    checkpoint: str | None = option(
        None,
        flag="--rm-model",
        help="Hugging Face checkpoint of a sequence classifier with one label and the policy's tokenizer",
        metavar="DIR",
    )
    device: str = option(
        "auto",
        flag="--rm-device",
        help="device that holds it in each process that computes rewards: auto (as --device), cpu, cuda or cuda:N",
    )
    max_tokens: int = option(
        16384,
        flag="--rm-max-tokens",
        help="largest number of tokens of a forward pass, padding included; a longer response is scored alone",
        metavar="N",
        ge=1,
    )
