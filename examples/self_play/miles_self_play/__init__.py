"""Two policies play against each other, each with its own engine. The plugin uses public names only."""

from miles_core.plugin import Plugin

__version__ = "0.1.0"

plugin = Plugin(
    name="self_play",
    summary="Two policies play against each other",
    version=__version__,
    core="~=0.1",
    hooks={"": "miles_self_play.hooks:SelfPlay"},
    provides={
        "generate": {"game": "miles_self_play.game:make_generate"},
        "reward": {"game": "miles_self_play.game:make_reward"},
    },
)
