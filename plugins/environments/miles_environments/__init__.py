"""Prompts and rewards from environment libraries for miles-core: task generators, task sets and text environments."""

from miles_core.plugin import Hint, Panel, Plugin, Rule, Set, above
from miles_environments.config import EnvironmentsConfig
from miles_environments.environment import Environment, Episode, Observation, Step, Task

__version__ = "0.1.0"
__all__ = ["Environment", "Episode", "Observation", "Step", "Task", "plugin"]

#: Options of prompt files that the user set.
_COLUMNS = "data.input_key != input or data.label_key or data.metadata_key != metadata or data.shuffle"
_BECAUSE = "--environments supplies prompts and rewards"

plugin = Plugin(
    name="environments",
    summary="prompts, episodes and rewards from environment libraries",
    version=__version__,
    core="~=0.1",
    config=EnvironmentsConfig,
    hooks={"": "miles_environments.hooks:Environments"},
    provides={
        "prompts": {"environments": "miles_environments.mixture:make_prompts"},
        "generate": {"environments": "miles_environments.rollout:EpisodeLoop"},
        "reward": {
            "environments": "miles_environments.reward:make_reward",
            "unit_tests": "miles_environments.unit_tests:make_reward",
        },
    },
    sets={
        "data.prompts": Set("environments", when="environments.mix", because=_BECAUSE),
        "reward.rm_type": Set("environments", when="environments.mix and not reward.custom_rm_path", because=_BECAUSE),
    },
    requires=(
        Rule(
            needs="environments.mix",
            when="data.prompts == environments or rollout.generate == environments or reward.rm_type == environments",
            because="no environment is chosen: give --environments LIBRARY:TASK",
        ),
        Rule(
            needs="reward.reward_key == none",
            when="reward.rm_type == unit_tests",
            because="this reward is a number, and only a dict has entries",
        ),
    ),
    notes={
        f"data.prompts == environments and not evaluation.prompt_data and not sft.data and ({_COLUMNS})": "no effect: --input-key, --label-key, "
        "--metadata-key and --rollout-shuffle are about prompt files, and this run reads none",
    },
    review="miles_environments.review:review",
    hints=(
        Hint(
            "failed-episodes",
            "environments/failed_episodes",
            above(0.1),
            "{metric}: {percent} of the episodes failed",
            "see run.log for the reasons; raise --environment-seconds if steps take longer than that",
        ),
    ),
    panels=(
        Panel("environment_reward", "Reward by environment", {"environments/*/reward": "*"}),
        Panel("environment_level", "Difficulty by environment", {"environments/*/level": "*"}, "level"),
        Panel(
            "environment_failures",
            "Samples without a score, and failed episodes",
            {"environments/masked": "not scored (number)", "environments/failed_episodes": "failed (fraction)"},
        ),
    ),
    toy={"environments": "file:miles_environments.toy:Letters", "prompt_data": None, "custom_rm_path": None},
)
