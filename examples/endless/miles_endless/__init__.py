"""An endless source of sums, and a reward that compares the answers of a group. The plugin uses public names only."""

from miles_core.plugin import Plugin

__version__ = "0.1.0"

plugin = Plugin(
    name="endless",
    summary="An endless prompt source and a group reward",
    version=__version__,
    core="~=0.1",
    provides={
        "prompts": {"sums": "miles_endless.sums:make_prompts"},
        "reward": {"novelty": "miles_endless.novelty:make_reward"},
    },
)
