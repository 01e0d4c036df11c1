"""Weight updates without intermediate copies: shared storage, shared memory, device handles and broadcasts, for miles-core."""

from miles_core.plugin import Plugin, Rule
from miles_zero_copy.config import ZeroCopyConfig

__version__ = "0.1.0"

#: Flags of slime's weight differences, which this plugin sends by itself between machines.
_FOREIGN_FLAGS = {
    "--update-weight-mode": {"delta": "--use-zero-copy-sync", "full": ""},
    "--delta-compression": {"*": ""},
    "--delta-dtype": {"*": ""},
    "--delta-full-interval": {"*": ""},
}
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
    foreign_flags=_FOREIGN_FLAGS,
    requires=(
        Rule(
            needs="schedule != sync",
            when="zero_copy.async_sync",
            because="with --schedule sync the engine does not generate while weights are sent",
        ),
    ),
    notes={
        f"{_INSIDE} and schedule == sync": "engine and trainer share the storage of unquantised weights, because they take turns in "
        "one process; these weights are not copied",
        f"{_INSIDE} and schedule != sync and not zero_copy.async_sync": "the engine keeps its own weights and copies each version, "
        "because it generates while the trainer steps (--schedule sync would share the storage)",
        f"{_INSIDE} and not zero_copy.async_sync and sync_bucket_size != 536870912": "no effect: --sync-bucket-size limits what is sent at a "
        "time, and within one process nothing is sent",
        "zero_copy.async_sync": "the engine holds a second copy of the encoded weights while the next version is staged",
        "runtime != inline": "the first transfer chooses the path: handles on a GPU or between peers, a broadcast (NCCL) between GPUs without "
        "peer access, shared memory on the same host, else messages over the runtime's channel with the difference to the previous "
        "version, for which both sides keep another copy of the encoded weights in host memory; the log shows the path and the reason",
    },
)
