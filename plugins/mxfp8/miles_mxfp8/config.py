"""The options of the plugin."""

from dataclasses import dataclass

from miles_formats import Fp8Options


@dataclass(frozen=True, kw_only=True)
class Mxfp8Config(Fp8Options):
    """FP8 in blocks of 32 with power-of-two scales."""
