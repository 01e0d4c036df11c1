"""On-policy distillation: a student learns from a frozen teacher's probabilities of its own samples. A plugin against public names only."""

from dataclasses import dataclass

from miles_core.data import Field
from miles_core.plugin import Plugin, Rule, option

__version__ = "0.1.0"


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """On-policy distillation."""

    teacher: str = option(
        "",
        flag="--distillation-teacher",
        help="the policy to learn from (default: the only frozen one)",
        metavar="NAME",
    )
    top_k: int = option(
        0,
        flag="--distillation-top-k",
        help="compare the distributions over the teacher's K most probable tokens and all others together; 0 compares the "
        "sampled token only",
        ge=0,
    )


plugin = Plugin(
    name="distillation",
    summary="on-policy distillation from a frozen teacher",
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
            needs="algorithm.advantage_estimator == distillation",
            because="the student learns from the teacher's probabilities",
        ),
        Rule(
            needs="trainer == embedded",
            when="distillation.top_k > 0",
            because="the trainer has to return the log-probabilities of the teacher's tokens (capability candidates)",
        ),
    ),
    hooks={"": "miles_distillation.hooks:Distillation"},
)
