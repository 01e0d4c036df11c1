"""The options of the plugin."""

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class R3Config:
    """Rollout routing replay."""

    use: bool = option(
        False,
        flag="--use-r3",
        aliases=("--use-rollout-routing-replay",),
        help="enable the plugin",
        enables=True,
    )
    buffer_size: int | None = option(
        None,
        flag="--r3-buffer-size",
        help="routing records kept in memory, in samples; further ones spill to the run directory (default: all in memory)",
        ge=0,
    )
    recomputed: Literal["sampled", "newest"] = option(
        "sampled",
        flag="--r3-recomputed-routes",
        help="routes of tokens that the engine computes again with new weights (--partial-rollout): those with which they were sampled, or "
        "the newest, which the tokens after them depend on",
        only_if="rollout.partial_rollout or schedule == async",
    )
    deterministic: bool = option(
        False,
        flag="--deterministic-expert-routing",
        help="FP32 router, ties by expert index, experts in ascending order, on engine and trainer",
    )
