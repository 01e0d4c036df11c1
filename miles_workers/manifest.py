"""The manifest of this package: the runtime ``inline``, instead of core's, with ``--rollout-workers``; checksums of sent weights."""

from miles_core.plugin.manifest import Plugin
from miles_core.version import __version__

plugin = Plugin(
    name="workers",
    summary="rollouts in other processes, shipped with miles-core",
    version=__version__,
    core=f"=={__version__}",
    standard=True,
    provides={
        "runtime": {"inline": "miles_workers.inline_rollouts:make_runtime"},
        "sent_weights": {"checksums": "miles_workers.transport.sent_weights:SentWeights"},
    },
    capabilities={"runtime": ("rollout_workers",)},
)
