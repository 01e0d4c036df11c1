"""MXFP6 (E2M3) weights for miles-core: an example of a third party's number format."""

from miles_formats import format_plugin

__version__ = "0.1.0"

plugin = format_plugin(
    "mxfp6",
    "MXFP6 (E2M3) weights in 1x32 blocks with power-of-two scales",
    version=__version__,
    core="~=0.1",
    format="miles_mxfp6.format:Mxfp6",
    format_error={"": 0.04},
)
