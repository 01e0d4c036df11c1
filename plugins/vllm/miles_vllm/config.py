"""The options of this plugin."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from miles_core.plugin import ConfigError, option

#: Arguments of vLLM that the engine sets -> what determines them.
OWN = {
    "model": "--hf-checkpoint",
    "tokenizer": "--hf-checkpoint",
    "load_format": "the engine: the first sync sends the weights",
    "dtype": "--dtype",
    "seed": "--seed",
    "device": "--device",
    "max_model_len": "--rollout-max-context-len",
    "max_num_seqs": "--max-running-requests",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--rollout-precision",
    "logprobs_mode": "the engine: log-probabilities of the sampled distribution",
    "worker_extension_cls": "the engine: it receives the weights",
    "tensor_parallel_size": "--vllm-tensor-parallel-size",
    "gpu_memory_utilization": "--vllm-gpu-memory-utilization",
    "enforce_eager": "--vllm-enforce-eager",
    "enable_sleep_mode": "--vllm-enable-sleep-mode",
    "enable_return_routed_experts": "--vllm-enable-return-routed-experts",
    **dict.fromkeys(("enable_lora", "max_lora_rank", "max_loras", "max_cpu_loras"), "--lora-sync adapter"),
}
#: Maximum ranks of adapters for which vLLM has room.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
#: Arguments of vLLM that this plugin does not support -> why.
REFUSED = {
    "speculative_config": "drafts would keep the weights of the start",
    "data_parallel_size": "each copy would need the weight updates; start several engines instead",
    "pipeline_parallel_size": "a stage has only some of the parameters that updates contain",
    "weight_transfer_config": "the engine has its own transfer of weights",
}


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """vLLM as the rollout engine."""

    url: tuple[str, ...] | None = option(
        None,
        flag="--vllm-url",
        help="use the vLLM servers running at these addresses instead of starting one; or a file with one address per line, which may change "
        "during the run",
        metavar="URL,URL|@FILE",
    )
    weights_dir: str | None = option(
        None,
        flag="--vllm-weights-dir",
        help="directory for weights as files, which the servers of --vllm-url must be able to read; without it they receive weights over HTTP",
        metavar="DIR",
    )
    tensor_parallel_size: int | None = option(
        None,
        flag="--vllm-tensor-parallel-size",
        help="number of GPUs of one vLLM (default: 1; with --runtime ray, --rollout-num-gpus-per-engine)",
        gt=0,
    )
    gpu_memory_utilization: float | None = option(
        None,
        flag="--vllm-gpu-memory-utilization",
        help="share of a GPU for vLLM's weights, activations and cache (default: .4 if the trainer uses the same GPU at the same time, "
        ".8 with --colocate, else vLLM's default)",
        gt=0,
        le=1,
    )
    enforce_eager: bool = option(
        False, flag="--vllm-enforce-eager", help="run vLLM without torch.compile and CUDA graphs"
    )
    enable_sleep_mode: bool = option(
        False,
        flag="--vllm-enable-sleep-mode",
        help="let vLLM release its GPU memory during training; --colocate sets it",
    )
    enable_return_routed_experts: bool = option(
        False,
        flag="--vllm-enable-return-routed-experts",
        help="record the experts that vLLM chose; --plugins r3 sets it",
    )
    args: str = option(
        "",
        flag="--vllm-args",
        help="further fields of vLLM's AsyncEngineArgs as a JSON object, for example '{\"max_num_batched_tokens\": 8192}'",
        metavar="JSON",
    )
    startup_timeout: float = option(
        900.0, flag="--vllm-startup-timeout", help="seconds to wait until vLLM is ready", gt=0
    )


def read_args(text: str) -> dict[str, Any]:
    """Return the fields of ``--vllm-args``.

    Raises:
        ConfigError: it is no JSON object, or has a field that another option determines or that the plugin does not support.
    """
    try:
        found = json.loads(text) if text else {}
    except ValueError as error:
        raise ConfigError(f"--vllm-args {text}: expected a JSON object ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f'--vllm-args {text}: expected a JSON object, such as {{"max_num_batched_tokens": 8192}}')
    for name in found:
        if name in OWN:
            raise ConfigError(f"--vllm-args has {name}, which is determined by {OWN[name]}; leave it out")
        if name in REFUSED:
            raise ConfigError(f"--vllm-args has {name}, which --engine vllm does not support: {REFUSED[name]}")
    return found
