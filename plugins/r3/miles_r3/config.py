"""The options of r3."""

from dataclasses import dataclass

from miles_core.config import option


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
