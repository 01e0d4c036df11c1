"""PPO with a critic (arXiv 1707.06347) and generalised advantage estimation (arXiv 1506.02438), for miles-core."""

from miles_core.data import Field
from miles_core.plugin import Hint, Panel, Plugin, Rule, above, below
from miles_ppo.config import PpoConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="ppo",
    summary="PPO: a critic (its own model, or a head on the policy's trunk) and GAE",
    version=__version__,
    core="~=0.1",
    config=PpoConfig,
    fields=(
        Field("values", "float32", "response"),
        Field("old_log_probs", "float32", "response"),
        Field("ref_log_probs", "float32", "response"),
    ),
    provides={"advantage": {"ppo": "miles_ppo.ppo:make_advantage"}},
    uses={"trainer.values": "the critic is a model with a value head"},
    requires=(
        Rule(
            "algorithm.advantage_estimator not in {grpo, dr_grpo, rloo, gspo, reinforce_plus_plus, reinforce_plus_plus_baseline, cispo}",
            because="advantage estimators without a critic do not read its values; --advantage-estimator ppo does, and so does any estimator "
            "of a plugin that declares the column values",
        ),
        Rule(
            "trainer == embedded",
            when="ppo.trunk == policy",
            because="the head reads the policy's last hidden states, which only the embedded trainer hands to a value head next to "
            "the output layer",
        ),
    ),
    review="miles_ppo.review:review",
    memory="miles_ppo.memory:usage",
    hooks={"": "miles_ppo.hooks:Ppo"},
    panels=(
        Panel(
            "ppo_explained_variance",
            "Variance of the returns that the critic explains",
            {"*ppo/explained_variance": "*explained variance"},
            section="Critic",
        ),
        Panel(
            "ppo_values",
            "Values and returns",
            {"*train/values": "*values", "*train/returns": "*returns"},
            section="Critic",
        ),
        Panel("ppo_value_loss", "Loss of the critic", {"*train/value_loss": "*value loss"}, section="Critic", log=True),
        Panel(
            "ppo_value_clip",
            "Values that the clip of the value loss holds back",
            {"*train/value_clip_fraction": "*clipped values"},
            section="Critic",
            percent=True,
        ),
    ),
    hints=(
        Hint(
            "critic-explains-nothing",
            "*ppo/explained_variance",
            below(0.0, steps=20),
            "{metric}: the critic's values predict the returns worse than their mean (explained variance {value})",
            "raise --critic-lr, let the critic learn first (--num-critic-only-steps), or train it longer on each rollout "
            "(--critic-steps-per-rollout)",
        ),
        Hint(
            "values-at-clip",
            "*train/value_clip_fraction",
            above(0.5, steps=10),
            "{metric}: the value loss clips {percent} of the values",
            "raise --value-clip to the scale of the rewards, or lower --critic-lr",
        ),
    ),
    toy={"advantage_estimator": "ppo"},
)
