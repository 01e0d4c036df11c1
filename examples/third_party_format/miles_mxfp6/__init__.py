"""MXFP6 (E2M3) weights for miles-core: an example of a third party's number format."""

from miles_core.plugin.manifest import Pair, Plugin

__version__ = "0.1.0"

plugin = Plugin(
    name="mxfp6",
    summary="MXFP6 (E2M3) weights in 1x32 blocks with power-of-two scales",
    version=__version__,
    core="~=0.1",
    formats={"mxfp6": "miles_mxfp6.format:Mxfp6"},
    claims={"precision": "a run has one low-precision format"},
    pairs=(Pair("mxfp6", "bf16"), Pair("mxfp6", "mxfp6")),
    aliases={"--rollout-mxfp6": {"rollout.precision": "mxfp6"}, "--train-mxfp6": {"train.precision": "mxfp6"}},
)
