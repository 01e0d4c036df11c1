"""The options of the plugin."""

from dataclasses import dataclass

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
    deterministic: bool = option(
        False,
        flag="--deterministic-expert-routing",
        help="FP32 router, ties by expert index, experts in ascending order, on engine and trainer",
    )
