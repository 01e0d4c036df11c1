"""On-policy distillation: a student learns from the probabilities that frozen teachers assign to its own samples."""

from miles_core.data import Field
from miles_core.plugin import Hint, Panel, Plugin, Rule, above, below
from miles_distillation.config import DistillationConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="distillation",
    summary="on-policy distillation from frozen teachers (reverse KL per token, optional top-k)",
    version=__version__,
    core="~=0.1",
    config=DistillationConfig,
    fields=(
        Field("teacher_log_probs", "float32", "response"),
        Field("teacher_top_log_probs", "float32", "response", shape=(None,)),
    ),
    provides={
        "advantage": {"distillation": "miles_distillation.hooks:make_advantage"},
        "reward": {"nothing": "miles_distillation.hooks:make_reward"},
    },
    requires=(
        Rule(
            needs="trainer == embedded",
            when="distillation.top_k > 0",
            because="the trainer has to return the log-probabilities of the teacher's tokens (capability candidates)",
        ),
        Rule(
            needs="distillation.score_with == trainer",
            when="distillation.top_k > 0",
            because="an engine scores the sampled tokens only, and not a teacher's most probable ones",
        ),
        Rule(
            needs="distillation.coef == 1",
            when="algorithm.advantage_estimator == distillation",
            because="the coefficient weighs the divergence against a loss from rewards, and this estimator ignores rewards",
        ),
        Rule(
            needs="algorithm.advantage_estimator == distillation",
            when="reward.rm_type == nothing",
            because="without rewards, other estimators give every token the advantage 0",
        ),
        Rule(
            needs="reward.reward_key == none",
            when="reward.rm_type == nothing",
            because="this reward is a number, and only a dict has entries",
        ),
    ),
    review="miles_distillation.review:review",
    hooks={"": "miles_distillation.hooks:Distillation"},
    hints=(
        Hint(
            "teacher-far",
            "*distillation/reverse_kl",
            above(3.0),
            "{metric}: the student's tokens lose {value} nats each under the teacher",
            "the teacher sees text that it would hardly write: warm the student up on the teacher's answers (--sft-data), or check that "
            "teacher and student use one chat template and --rollout-temperature",
        ),
        Hint(
            "top-k-mass",
            "*distillation/top_k_mass",
            below(0.5),
            "{metric}: the teacher's top-k tokens hold {percent} of the student's probability, all others count as one token",
            "raise --distillation-top-k, or compare sampled tokens (--distillation-top-k 0) until the student is closer",
        ),
    ),
    panels=(
        Panel(
            "distillation",
            "Distance to the teacher",
            {
                "*distillation/reverse_kl": "* sampled token",
                "*distillation/top_k_reverse_kl": "* top-k",
            },
            "nats per token",
        ),
    ),
    toy={"policies": {"student": {}, "teacher": {"role": "frozen", "hf_checkpoint": "{model}"}}},
)
