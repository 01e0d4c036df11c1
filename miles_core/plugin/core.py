"""What core declares about itself, in the form every plugin uses.

The embedded engine and trainer, the inline runtime and the in-process transport are parts like any other; ``core`` is
always active, comes last in every chain and cannot be named after ``--plugins``.
"""

from __future__ import annotations

from miles_core import __version__
from miles_core.data.field import CORE_FIELDS
from miles_core.plugin.manifest import Pair, Plugin

CORE = Plugin(
    name="core",
    summary="The loop, the embedded engine and trainer, BF16",
    version=__version__,
    core=f"=={__version__}",
    fields=CORE_FIELDS,
    provides={
        "runtime": {"inline": "miles_core.runtime:make_runtime"},
        "model": {"transformers": "miles_core.embedded.model:make_model"},
        "engine": {"embedded": "miles_core.embedded.build:make_engine"},
        "trainer": {"embedded": "miles_core.embedded.trainer:make_trainer"},
        "decoder": {"plain": "miles_core.embedded.decoder:make_decoder"},
        "transport": {"copy": "miles_core.sync.transport:make_transport"},
    },
    capabilities={
        "engine": (
            "routed_experts",
            "sampling_support",
            "score",
            "score_temperature",
            "token_versions",
            "draft",
            "keyed_sampling",
            "hot_update",
            "rebuild",
        ),
        "trainer": ("entropy", "sampling_support", "routing_replay", "rebuild"),
        "runtime": (),
    },
    pairs=(Pair("bf16", "bf16"),),
    aliases={"--bf16": {"model.dtype": "bfloat16"}},
)
