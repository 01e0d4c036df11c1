"""vLLM as the rollout engine, for miles-core."""

from miles_core.plugin import Capability, Package, Plugin, Rule, Set
from miles_vllm.config import VllmConfig
from miles_vllm.installed import INSTALL, TESTED

__version__ = "0.1.0"

#: Options that have no effect on running servers.
_OF_A_PROCESS = (
    "vllm.args", "vllm.enforce_eager", "vllm.gpu_memory_utilization", "vllm.tensor_parallel_size",
)  # fmt: skip

plugin = Plugin(
    name="vllm",
    summary="vLLM as the rollout engine: a separate local process, or servers that are already running",
    version=__version__,
    core="~=0.1",
    config=VllmConfig,
    notes={
        "engine == vllm and vllm.url and not vllm.weights_dir": (
            "the running servers receive weights over HTTP, in messages with checksums; --vllm-weights-dir DIR sends them as files instead, in a "
            "directory that all servers can read"
        ),
        "engine == vllm and vllm.url and vllm.weights_dir": (
            "the running servers receive weights as files, which they must be able to read in --vllm-weights-dir"
        ),
    },
    provides={"engine": {"vllm": "miles_vllm.build:make_engine"}},
    capabilities={
        "engine": (
            "score",
            "hot_update",
            "transport:adapter",
            Capability("transport:buckets", when="not vllm.url"),
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
        *(
            Rule(
                needs="not vllm.url",
                when=name,
                because="the option configures a vLLM that the run starts; give the servers of --vllm-url the option instead",
            )
            for name in _OF_A_PROCESS
        ),
        Rule(
            needs="rollout.kv_cache_dtype == auto",
            when="vllm.url",
            because="running servers keep the cache in the dtype with which they were started; give them --kv-cache-dtype",
        ),
        Rule(
            needs="vllm.url",
            when="vllm.weights_dir",
            because="only running servers receive weights as files; a vLLM that the run starts reads its memory",
        ),
        Rule(
            needs="not vllm.weights_dir",
            when="transport == adapter",
            because="adapters are small, and travel over HTTP",
        ),
        Rule(
            needs="model.quantized == none",
            when="engine == vllm and transport == adapter",
            because="this plugin runs vLLM in BF16, and an update of adapters does not send the dequantised base; convert the checkpoint "
            "(miles convert --to bf16), or use --lora-sync merged",
        ),
        Rule(
            needs="not vllm.url",
            when="vllm.enable_sleep_mode or vllm.enable_return_routed_experts",
            because="sleep mode and routed experts are available with a vLLM that the run starts",
        ),
        Rule(
            needs="vllm.url or (gpu.count > 0 and model.device != cpu)",
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
        Package(
            "vllm",
            TESTED,
            when="engine == vllm and gpu.memory_gb and model.device != cpu and not vllm.url",
            install=INSTALL,
        ),
    ),
    hooks={"vllm.url": "miles_vllm.pool:VllmMetrics"},
    review="miles_vllm.review:review",
    memory="miles_vllm.memory:usage",
)
