"""Sums without end, answers scored by comparison with the rest of their group. A plugin against public names only."""

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
