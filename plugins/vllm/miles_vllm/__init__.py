"""vLLM as the rollout engine, for miles-core."""

from miles_core.plugin import Capability, Package, Plugin, Rule, Set
from miles_vllm.config import VllmConfig
from miles_vllm.installed import INSTALL, TESTED

__version__ = "0.1.0"

plugin = Plugin(
    name="vllm",
    summary="vLLM as the rollout engine, in a process of its own",
    version=__version__,
    core="~=0.1",
    config=VllmConfig,
    provides={"engine": {"vllm": "miles_vllm.build:make_engine"}},
    capabilities={
        "engine": (
            "score",
            "hot_update",
            "transport:buckets",
            Capability("sleep", when="vllm.enable_sleep_mode"),
            Capability("routed_experts", when="vllm.enable_return_routed_experts"),
        )
    },
    sets={
        "vllm.enable_sleep_mode": Set(
            True, when="colocate and engine == vllm", because="the trainer needs the memory during the training step"
        ),
        "vllm.enable_return_routed_experts": Set(
            True, when="plugin.r3 and engine == vllm", because="r3 replays the experts that vLLM chose"
        ),
    },
    requires=(
        Rule(needs="model.device != cpu", when="vllm.enable_sleep_mode", because="vLLM sleeps on GPUs only"),
        Rule(
            needs="model.device != cpu",
            when="vllm.enable_return_routed_experts",
            because="vLLM records routed experts on GPUs only",
        ),
        Rule(
            needs="gpu.count > 0 and model.device != cpu",
            when="engine == vllm and model.num_experts > 0",
            because="on a CPU, vLLM 0.32 computes another function with experts after it has reloaded them; --engine embedded also runs on "
            "a CPU",
        ),
        Rule(
            needs="rollout.pause_generation_mode == abort",
            because="the plugin does not record which weights sampled each token, so a response must have one version",
        ),
        Rule(needs="rollout.temperature <= 2", because="vLLM accepts no higher temperature"),
        Rule(
            needs="not rollout.full_vocab_logprobs",
            when="rollout.top_p < 1 or rollout.top_k > 0",
            because="with top-p or top-k, vLLM returns log-probs over the sampling support only",
        ),
    ),
    # on a CPU, ``review`` also accepts a build with another name
    packages=(
        Package("vllm", TESTED, when="engine == vllm and gpu.memory_gb and model.device != cpu", install=INSTALL),
    ),
    review="miles_vllm.review:review",
)
