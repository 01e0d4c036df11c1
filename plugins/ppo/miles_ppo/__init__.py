"""PPO with a critic (arXiv 1707.06347) and generalised advantage estimation (arXiv 1506.02438), for miles-core."""

from miles_core.data import Field
from miles_core.plugin import Hint, Panel, Plugin, Rule, above, below
from miles_ppo.config import PpoConfig

__version__ = "0.1.0"

_OWN = "only a critic that is a model of its own (--critic-trunk own) has this setting; the head on the policy's trunk is part of the policy"
_SHARED = "only a value head on the policy's trunk (--critic-trunk policy) has this setting; a critic of its own has a loss of its own"

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
            "algorithm.advantage_estimator == ppo", because="other advantage estimators do not read the critic's values"
        ),
        Rule(
            "trainer == embedded",
            when="ppo.trunk == policy",
            because="the head reads the policy's last hidden states, which only the embedded trainer hands to a value head next to "
            "the output layer",
        ),
        Rule("ppo.trunk == own", when="ppo.checkpoint", because=_OWN),
        Rule("ppo.trunk == own", when="ppo.optimizer", because=_OWN),
        Rule("ppo.trunk == own", when="ppo.steps_per_rollout", because=_OWN),
        Rule("ppo.trunk == policy", when="ppo.value_loss_coef", because=_SHARED),
        Rule("ppo.trunk == policy", when="ppo.detach_trunk", because=_SHARED),
        Rule(
            "ppo.lr_schedule != constant",
            when="ppo.min_lr",
            because="a constant learning rate of the critic does not decay (--critic-lr-decay-style)",
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
)
