"""Weights that do not travel, or not through a copy on the way, for miles-core."""

from miles_core.plugin import Plugin, Rule
from miles_zero_copy.config import ZeroCopyConfig

__version__ = "0.1.0"

_INSIDE = "runtime == inline and engine == embedded"

plugin = Plugin(
    name="zero_copy",
    summary="shared storage, shared memory, device handles, broadcasts and deltas for the weight sync, with checksums",
    version=__version__,
    core="~=0.1",
    config=ZeroCopyConfig,
    hooks={"": "miles_zero_copy.hooks:ZeroCopy"},
    provides={"transport": {"buckets": "miles_zero_copy.transport:make_transport"}},
    capabilities={"transport": ("buckets",)},
    sets={"transport": "buckets"},
    measures="miles_zero_copy.limits:limits",
    requires=(
        Rule(
            needs="schedule != sync",
            when="zero_copy.async_sync",
            because="with --schedule sync nothing is generated while a version is on its way",
        ),
    ),
    notes={
        f"{_INSIDE} and schedule == sync": "engine and trainer hold one storage of what is not quantised, because they take "
        "turns in one process; nothing of it is moved",
        f"{_INSIDE} and schedule != sync and not zero_copy.async_sync": "the engine keeps weights of its own and copies each "
        "version, because it generates while the trainer steps (--schedule sync would share one storage)",
        "zero_copy.async_sync": "the engine holds a second copy of the encoded weights, from when a version is trained until it "
        "is in force",
        "runtime != inline": "the first transfer chooses the path: on one GPU handles, between GPUs that do not see each other a "
        "broadcast (NCCL), on one host shared memory, else messages over the runtime's own channel with what changed since the "
        "version before, for which both sides keep the encoded weights once more in host memory; the log says which, and why",
    },
)
