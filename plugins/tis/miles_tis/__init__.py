"""Truncated and masked importance sampling between rollout engine and trainer, for miles-core."""

from miles_core.plugin.manifest import Plugin, Rule
from miles_tis.config import TisConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="tis",
    summary="truncated/masked importance sampling between engine and trainer log-probs (TIS, MIS, IcePop)",
    version=__version__,
    core="~=0.1",
    config=TisConfig,
    hooks={"": "miles_tis.hooks:Tis"},
    requires=(
        Rule(
            needs="not algorithm.use_rollout_logprobs",
            when="tis.use or tis.metrics_only or not tis.opsm",
            because="weights compare the trainer's old log-probs with the engine's, and bypass mode has only the engine's",
        ),
    ),
    after=("r3",),
)
