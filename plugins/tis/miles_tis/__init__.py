"""Truncated and masked importance sampling between rollout engine and trainer, for miles-core."""

from miles_core.plugin import Hint, Plugin, Remedy, Rule, above, below
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
            because="importance weights need the trainer's old log-probs and the engine's, and bypass mode has only the engine's",
        ),
    ),
    after=("r3",),
    remedies=(Remedy("mismatch", "weigh tokens by importance (--plugins tis)", when="not plugin.tis"),),
    hints=(
        Hint(
            "effective-samples",
            "*tis/ess",
            below(0.5),
            "{metric}: the importance weights leave an effective sample size of {value} of the tokens",
            "engine and trainer differ strongly: find the cause (miles verify --budget), bound weights per token (--tis-level token), "
            "lower --lr, or use fewer steps per rollout",
            trouble="mismatch",
        ),
        Hint(
            "weights-at-bound",
            "*tis/fraction_truncated_high",
            above(0.1),
            "{metric}: {percent} of the importance weights are cut at their upper bound, which biases the gradient",
            "use fewer optimizer steps per rollout (--num-steps-per-rollout), or find the cause of the mismatch "
            "(miles verify --budget)",
            trouble="mismatch",
        ),
        Hint(
            "vetoed",
            "*tis/fraction_vetoed",
            above(0.05),
            "{metric}: {percent} of the tokens are in sequences that were dropped as a whole",
            "some tokens have almost no probability in the trainer: miles verify shows which; "
            "check that both sides use the same sampler (--full-vocab-logprobs off) and number format",
        ),
    ),
    demo=True,
)
