"""pass@k, majority@k, subsets and early stopping in evaluations, for miles-core."""

from miles_core.plugin import Panel, Plugin
from miles_pass_at_k.config import PassAtKConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="pass_at_k",
    summary="pass@k and majority@k with intervals, subsets, early stopping and the best checkpoint in evaluations",
    version=__version__,
    core="~=0.1",
    config=PassAtKConfig,
    aliases={"--eval-only": {"rollout.num_rollout": 0, "evaluation.interval": 1}},
    review="miles_pass_at_k.review:review",
    hooks={"": "miles_pass_at_k.hooks:PassAtK", "pass_at_k.keep_best": "miles_pass_at_k.best:BestCheckpoint"},
    panels=(
        Panel(
            "pass_at_k_best",
            "Best value of --keep-best",
            {"pass_at_k/best": "best value so far"},
            section="pass_at_k",
        ),
    ),
)
