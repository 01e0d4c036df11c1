"""What core declares about itself, in the form every plugin uses.

The inline runtime, the schedules and the in-process transport are parts like any other; ``core`` is always active, comes last in every
chain and cannot be named after ``--plugins``.
"""

from __future__ import annotations

from miles_core.data.field import CORE_FIELDS
from miles_core.plugin.manifest import Pair, Plugin
from miles_core.version import __version__

CORE = Plugin(
    name="core",
    summary="The loop, BF16",
    version=__version__,
    core=f"=={__version__}",
    fields=CORE_FIELDS,
    provides={
        "runtime": {"inline": "miles_core.run.inline:make_runtime"},
        "schedule": {
            "sync": "miles_core.schedule.sync:make_schedule",
            "ahead": "miles_core.schedule.ahead:make_schedule",
            "async": "miles_core.schedule.continuous:make_schedule",
        },
        "transport": {"copy": "miles_core.sync.copy:make_transport"},
    },
    capabilities={"runtime": ()},
    pairs=(Pair("bf16", "bf16"),),
    aliases={"--bf16": {"model.dtype": "bfloat16"}, "--fully-async": {"run.schedule": "async"}},
)
