"""The options of the plugin."""

from dataclasses import dataclass

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Load and memory of experts."""

    capacity_factor: float | None = option(
        None,
        flag="--moe-capacity-factor",
        aliases=("--moe-expert-capacity-factor",),
        help="in the trainer an expert computes at most ceil(F * tokens * top_k / experts) tokens of a micro-batch and drops the others",
        metavar="F",
        gt=0,
        enables=True,
    )
    token_drop_policy: str = option(
        "probs",
        flag="--moe-token-drop-policy",
        help="which tokens an expert at its capacity keeps: those with the largest weights (probs), or the first ones (position)",
        choices=("probs", "position"),
        only_if="experts.capacity_factor",
    )
    router_bias_update_rate: float = option(
        0.0,
        flag="--moe-router-bias-update-rate",
        help="after each optimiser step, change the correction bias of each expert by this rate towards the mean load (0: no change)",
        ge=0,
        enables=True,
    )
    offload: bool = option(
        False,
        flag="--offload-experts",
        help="keep expert weights and their optimizer state in host memory between uses",
        enables=True,
    )
