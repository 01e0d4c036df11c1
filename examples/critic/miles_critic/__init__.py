"""PPO with a critic: values from a second model, advantages by GAE. The plugin uses public names only."""

from dataclasses import dataclass

from miles_core.data import Field
from miles_core.plugin import Plugin, Rule, option

__version__ = "0.1.0"


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """A critic next to the policy."""

    lr: float = option(1e-5, flag="--critic-lr", help="learning rate of the critic", ge=0)
    only_steps: int = option(
        0, flag="--num-critic-only-steps", help="number of initial steps that train only the critic", ge=0
    )


plugin = Plugin(
    name="critic",
    summary="PPO: a critic next to the policy, and GAE",
    version=__version__,
    core="~=0.1",
    config=CriticConfig,
    fields=(Field("values", "float32", "response"),),
    requires=(
        Rule(
            "algorithm.advantage_estimator == ppo", because="other advantage estimators do not read the critic's values"
        ),
    ),
    provides={"advantage": {"ppo": "miles_critic.hooks:make_advantage"}},
    hooks={"": "miles_critic.hooks:Critic"},
)
