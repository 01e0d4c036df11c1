"""LoRA (arXiv 2106.09685) through `peft`: adapters are trained, the engine and exports get merged weights."""

from dataclasses import dataclass

from miles_core.plugin import Plugin, Rule, option

__version__ = "0.1.0"


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Low-rank adapters."""

    rank: int = option(8, flag="--lora-rank", help="rank of the adapters", ge=1)
    alpha: float = option(16.0, flag="--lora-alpha", help="adapters are scaled by ALPHA / rank", gt=0)
    modules: tuple[str, ...] = option(
        ("q_proj", "v_proj"), flag="--lora-modules", help="linear layers that get an adapter", metavar="NAME,..."
    )


plugin = Plugin(
    name="lora",
    summary="low-rank adapters through peft",
    version=__version__,
    core="~=0.1",
    config=LoraOptions,
    requires=(
        Rule(
            "train.precision == bf16",
            because="the engine receives the merged weights and rounds their sum, but the trainer would round the base and the adapter "
            "separately; the rollout may use a number format (--rollout-precision)",
        ),
    ),
    hooks={"trainer == embedded": "miles_lora.hooks:Lora"},
)
