"""The manifest of this package: rollouts in other processes for the runtime ``inline``; checksums of sent weights."""

from miles_core.plugin.manifest import Plugin
from miles_core.version import __version__

plugin = Plugin(
    name="workers",
    summary="rollouts in other processes, shipped with miles-core",
    version=__version__,
    core=f"=={__version__}",
    standard=True,
    provides={
        "inline_rollouts": {"processes": "miles_workers.inline_rollouts:InlineRolloutRuntime"},
        "sent_weights": {"checksums": "miles_workers.transport.sent_weights:SentWeights"},
    },
)
