"""A reward model as the reward of a run (``--rm-type model``), for miles-core."""

from miles_core.plugin import Plugin, Rule
from miles_reward_model.config import RewardModelConfig

__version__ = "0.1.0"

plugin = Plugin(
    name="reward_model",
    summary="the reward is the score of a sequence classifier (--rm-type model)",
    version=__version__,
    core="~=0.1",
    config=RewardModelConfig,
    provides={"reward": {"model": "miles_reward_model.reward:make_reward"}},
    requires=(
        Rule("reward.rm_type == model", because="it provides this reward and nothing else"),
        Rule("reward_model.checkpoint", because="it scores the responses: give --rm-model DIR"),
        Rule("reward.reward_key == none", because="this reward is a number, and only a dict has entries"),
        Rule("not data.media", because="it scores text only"),
    ),
    toy={"rm_type": "model", "custom_rm_path": None, "rm_model": "{reward_model}"},
)
