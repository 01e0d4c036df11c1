"""pass@k, majority@k, subsets and early stopping in evaluations, for miles-core."""

from miles_core.plugin import Plugin, Rule
from miles_pass_at_k.config import PassAtKConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="pass_at_k",
    summary="pass@k and majority@k with intervals, subsets and early stopping in evaluations",
    version=__version__,
    core="~=0.1",
    config=PassAtKConfig,
    requires=(
        Rule(
            "evaluation.prompt_data",
            when="pass_at_k.pass_at or pass_at_k.majority_at or pass_at_k.subset_key or pass_at_k.patience",
            because="its metrics are those of evaluations (--eval-prompt-data, --eval-interval)",
        ),
        Rule(
            "pass_at_k.majority_at",
            when="pass_at_k.answer_key",
            because="only majority@k compares answers (--eval-majority-at)",
        ),
        Rule(
            "pass_at_k.patience",
            when="pass_at_k.metric != eval/accuracy",
            because="only early stopping reads that metric (--early-stop-after)",
        ),
    ),
    aliases={"--eval-only": {"rollout.num_rollout": 0, "evaluation.interval": 1}},
    review="miles_pass_at_k.review:review",
    hooks={"": "miles_pass_at_k.hooks:PassAtK"},
)
