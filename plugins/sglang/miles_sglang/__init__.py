"""SGLang as the rollout engine, for miles-core."""

from miles_core import Capability, Plugin, Rule, Set
from miles_sglang.config import SglangConfig
from miles_sglang.installed import missing

__version__ = "0.1.0"

_SPECULATIVE = "sglang.speculative_algorithm"

plugin = Plugin(
    name="sglang",
    summary="SGLang as the rollout engine: started here in a process of its own, or a server that runs already",
    version=__version__,
    core="~=0.1",
    config=SglangConfig,
    provides={"engine": {"sglang": "miles_sglang.build:make_engine"}},
    capabilities={
        "engine": (
            "score",
            "hot_update",
            Capability("sampling_support", when=f"not {_SPECULATIVE}"),
            Capability("routed_experts", when="sglang.enable_return_routed_experts"),
            Capability("keyed_sampling", when=f"sglang.enable_deterministic_inference and not {_SPECULATIVE}"),
        )
    },
    sets={
        "sglang.enable_return_routed_experts": Set(
            True, when="plugin.r3 and engine == sglang", because="the experts to replay are the ones that SGLang chose"
        )
    },
    requires=(
        *missing(),
        Rule(
            needs="gpu.count > 0 or model.device == cpu or sglang.url",
            because="SGLang computes on a GPU; --engine embedded runs anywhere",
        ),
        Rule(
            needs="not sglang.dp_size > 1 or sglang.enable_dp_attention",
            because="SGLang takes new weights only without data-parallel copies, or with --sglang-enable-dp-attention; leave "
            "--sglang-dp-size out",
        ),
        Rule(
            needs=f"not {_SPECULATIVE}",
            when="rollout.top_p < 1 or rollout.top_k > 0",
            because="SGLang returns no sampling supports while it speculates, and under top-k or top-p the trainer needs them",
        ),
        Rule(
            needs="sglang.moe_a2a_backend != deepep",
            when="rollout.precision == mxfp8",
            because="SGLang has no MXFP8 kernel for the all-to-all of DeepEP",
        ),
        Rule(
            needs="not sglang.enable_lora",
            because="weights arrive for the model itself, and an adapter on top of it would not be what is trained",
        ),
    ),
)
