"""The options of the plugin."""

from dataclasses import dataclass
from typing import Literal

from miles_core.plugin import option


@dataclass(frozen=True, kw_only=True)
class Nvfp4Config:
    """NVFP4 expert weights (experimental)."""

    recipe: Literal["nvfp4"] | None = option(
        None,
        flag="--fp4-recipe",
        help="quantise engine and trainer alike: nvfp4 is --rollout-nvfp4 --train-nvfp4 (experimental)",
        enables=True,
    )
    format: Literal["e2m1"] = option(
        "e2m1", flag="--fp4-format", help="element type; e2m1 in the forward pass, the backward pass stays in full"
    )
    four_over_six: bool = option(
        False,
        flag="--fp4-four-over-six",
        help="map the maximum of a block to 4 instead of 6 if that reduces its error (arXiv 2512.02010)",
    )
