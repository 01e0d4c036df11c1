"""Rollout routing replay (R3, arXiv 2510.11370) for miles-core."""

from miles_core.data import Field
from miles_core.plugin import Plugin, Remedy, Rule
from miles_r3.config import R3Config

__version__ = "0.1.0"

#: Row t of a sample: the experts used when token t was the input, [MoE layers, top_k]. These rows are the largest
#: part of a batch. int16 is sufficient for all models; ``hooks`` declares ``index_dtype``.
ROUTES = Field("rollout_routed_experts", "int16", "token-1", pad=-1, shape=(None, None), required=True, label="routing")


def index_dtype(experts: int) -> str:
    """Return the smallest dtype that holds the indices of so many experts, and -1; 0 if their number is unknown."""
    return "int8" if 0 < experts <= 128 else ROUTES.dtype


_REPLAY = "replay the rollout's routing (--plugins r3)"

plugin = Plugin(
    name="r3",
    summary="replays the engine's expert choices in the trainer (MoE)",
    version=__version__,
    core="~=0.1",
    config=R3Config,
    hooks={"": "miles_r3.hooks:R3"},
    fields=(ROUTES,),
    uses={
        "engine.routed_experts": "r3 replays the experts that the engine used",
        "trainer.routing_replay": "the trainer's routers must accept expert indices",
    },
    requires=(
        Rule(
            needs="rollout.workers == none",
            when="r3.buffer_size",
            because="workers keep whole records in shared memory until they are trained on",
        ),
        Rule(needs="model.moe", because="there is no router to replay in a dense model"),
        Rule(
            needs="rollout.pause_generation_mode == abort",
            when="r3.recomputed == newest",
            because="an engine that keeps a request over a weight update returns the routes with which its tokens were sampled",
        ),
        Rule(
            needs="engine == embedded",
            when="r3.deterministic",
            because="both sides must choose experts by the same rule, and other engines choose in fused kernels, from logits in the model's dtype; "
            "leave the flag out: r3 replays what the engine chose, whichever way a tie went",
        ),
        Rule(
            needs="trainer == embedded",
            when="r3.deterministic",
            because="both sides must choose experts by the same rule, and Megatron-Core's router has its own, with sums over experts in the order of "
            "its permutation kernels; leave the flag out: r3 replays the engine's choices in its routers",
        ),
    ),
    before=("tis",),
    remedies=(
        Remedy("mismatch", _REPLAY, when="model.moe and not plugin.r3"),
        Remedy("instability", _REPLAY, when="model.moe and not plugin.r3"),
    ),
    demo=True,
)
