"""The manifest of core, in the same form as a plugin's manifest.

Its parts are in ``miles_core.defaults``. ``core`` is always active, is the innermost
function of every chain, and cannot be named in ``--plugins``.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.data.field import CORE_FIELDS
from miles_core.plugin.manifest import Pair, Plugin
from miles_core.version import __version__


@dataclass(frozen=True)
class Need:
    """A backend capability that an option of core needs, like an entry of ``Plugin.uses``.

    Attributes:
        who: name of the option in messages.
        when: condition under which the capability is needed.
        kind: kind of backend, e.g. ``engine``.
        capability: name of the capability.
        because: the reason.
    """

    who: str
    when: str
    kind: str
    capability: str
    because: str


_TRUNCATED = "not rollout.full_vocab_logprobs and (rollout.top_p < 1 or rollout.top_k > 0)"
_SUPPORT = "log-probs over the tokens that --rollout-top-p or --rollout-top-k keep; --full-vocab-logprobs does without"

NEEDS = (
    Need(
        "a truncated sampler",
        _TRUNCATED,
        "engine",
        "sampling_support",
        f"it records the tokens it kept, for {_SUPPORT}",
    ),
    Need("a truncated sampler", _TRUNCATED, "trainer", "sampling_support", f"it takes {_SUPPORT}"),
    Need(
        "--optimizer",
        "train.optimizer not in {adamw, adam}",
        "trainer",
        "optimizers",
        "a plugin provides it, and this trainer uses its own optimizer",
    ),
    Need("--entropy-coef", "algorithm.entropy_coef > 0", "trainer", "entropy", "the loss has the entropy in it"),
    Need(
        "--pause-generation-mode",
        "rollout.pause_generation_mode in {retract, in_place}",
        "engine",
        "token_versions",
        "one response then has tokens of several weight versions; --pause-generation-mode abort works with any engine",
    ),
    *(Need("--media", "data.media", kind, "media", "prompts may hold images") for kind in ("engine", "trainer")),
    Need("--rollout-workers", "rollout.workers", "runtime", "rollout_workers", "it starts the processes"),
    *(
        Need("--colocate", "colocate", kind, "sleep", "both take turns in the memory of the same GPUs")
        for kind in ("engine", "trainer")
    ),
)

CORE = Plugin(
    name="core",
    summary="The loop, BF16",
    version=__version__,
    core=f"=={__version__}",
    fields=CORE_FIELDS,
    provides={
        "schedule": {
            "sync": "miles_core.defaults:SyncSchedule",
            "ahead": "miles_core.defaults:make_ahead_schedule",
            "async": "miles_core.defaults:make_async_schedule",
        },
        "runtime": {"inline": "miles_core.defaults:make_inline_runtime"},
        "generate": {"turn": "miles_core.defaults:SingleTurn"},
        "reward": {
            "exact": "miles_core.defaults:make_exact",
            "boxed": "miles_core.defaults:make_boxed",
            "f1": "miles_core.defaults:make_f1",
        },
        "optimizer": dict.fromkeys(("adamw", "adam"), "miles_core.defaults:make_adamw"),
        "transport": {"copy": "miles_core.defaults:CopyTransport"},
        "check": {
            "weights_arrived": "miles_core.defaults:make_weights_check",
            "first_sync": "miles_core.defaults:make_first_sync_check",
            "verify_logprobs": "miles_core.defaults:make_sync_check",
        },
    },
    capabilities={"runtime": ("rollout_workers",)},
    pairs=(Pair("bf16", "bf16"),),
    aliases={"--bf16": {"model.dtype": "bfloat16"}, "--fully-async": {"run.schedule": "async"}},
)
