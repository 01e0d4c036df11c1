"""What core declares about itself, in the form every plugin uses.

The schedules and the in-process transport are parts like any other; ``core`` is always active, comes last in every
chain and cannot be named after ``--plugins``.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_core.data.field import CORE_FIELDS
from miles_core.plugin.manifest import Pair, Plugin
from miles_core.version import __version__


@dataclass(frozen=True)
class Need:
    """What an option of core takes from a backend, as ``Plugin.uses`` says it of a plugin.

    Attributes:
        who: the option, for messages.
        when: it is needed where this holds.
        kind, capability: what the selected backend must have.
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
        "a truncated sampler", _TRUNCATED, "engine", "sampling_support", f"it says which tokens it kept, for {_SUPPORT}"
    ),
    Need("a truncated sampler", _TRUNCATED, "trainer", "sampling_support", f"it takes {_SUPPORT}"),
    Need(
        "--optimizer",
        "train.optimizer not in {adamw, adam}",
        "trainer",
        "optimizers",
        "it is made by a plugin, and this trainer steps with an optimizer of its own",
    ),
    Need("--entropy-coef", "algorithm.entropy_coef > 0", "trainer", "entropy", "the loss has the entropy in it"),
    Need(
        "--pause-generation-mode",
        "rollout.pause_generation_mode in {retract, in_place}",
        "engine",
        "token_versions",
        "one response then has tokens of several weight versions; --pause-generation-mode abort works with any engine",
    ),
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
            "sync": "miles_core.schedule.sync:make_schedule",
            "ahead": "miles_core.schedule.ahead:make_schedule",
            "async": "miles_core.schedule.continuous:make_schedule",
        },
        "generate": {"turn": "miles_core.rollout.function:make_turn"},
        "optimizer": dict.fromkeys(("adamw", "adam"), "miles_core.train.adamw:make_optimizer"),
        "transport": {"copy": "miles_core.sync.copy:make_transport"},
    },
    pairs=(Pair("bf16", "bf16"),),
    aliases={"--bf16": {"model.dtype": "bfloat16"}, "--fully-async": {"run.schedule": "async"}},
)
