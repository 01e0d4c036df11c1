"""The runs of ``cluster_run.py``: their model and options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.engine.checkpoints import EXPERTS, VOCABULARY
from benchmarks.training.sglang_step import workload

SIZES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 9, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    "large": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    "small": {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
}  # fmt: skip
#: Options of SGLang that work without the kernels that it usually brings.
GPU = """--sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-moe-runner-backend triton
    --sglang-fp8-gemm-backend triton --sglang-disable-prefill-cuda-graph --sglang-mem-fraction-static 0.4"""
#: A response as long as a number that depends on the sample alone: log-normal, the median a sixth of the longest.
LONG_TAILED = """
import math
import random

def length(index, longest):
    return max(4, min(longest, int(math.exp(math.log(longest / 6) + random.Random(index).gauss(0, 1.0)))))

async def generate(args, sample, sampling_params):
    wanted, prompt = length(sample.index, sampling_params["max_new_tokens"]), list(sample.tokens)
    answer = await args.generate(prompt, {**sampling_params, "max_new_tokens": wanted})
    sample.tokens = prompt + answer.tokens
    sample.response_length = len(answer.tokens)
    sample.response = answer.text
    return sample
"""


def make_config(size: str, layers: int | None = None) -> Any:
    """Return the configuration of the model."""
    import transformers

    experts = EXPERTS if size != "tiny" else EXPERTS | {"num_experts": 4, "moe_intermediate_size": 128}
    sizes: dict[str, Any] = SIZES[size] | ({"num_hidden_layers": layers} if layers else {})
    make: Any = transformers.Qwen3MoeConfig
    return make(
        vocab_size=VOCABULARY, max_position_embeddings=4096, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False,
        intermediate_size=2 * sizes["hidden_size"], **sizes, **experts,
    )  # fmt: skip


def flags_of(given: Any, checkpoint: Path, directory: Path) -> list[str]:
    """Return the options of the run."""
    cpu = given.device == "cpu"
    if given.warm:
        place, plugins, steps, tokens = (
            "--engine sglang --no-self-check",
            given.plugins.replace(",zero_copy", ""),
            1,
            16,
        )
    else:
        ranks = 1 if given.separate else 2
        place = f"--runtime ray --trainer megatron --engine sglang --actor-num-gpus-per-node {ranks}"
        place += f" --expert-model-parallel-size {ranks}" * (ranks > 1) + " --rollout-num-gpus 2" * (ranks > 1)
        place += " --colocate" * (not cpu and ranks > 1) + " --max-restarts 4 --worker-timeout 120"
        plugins, steps, tokens = given.plugins, given.steps, given.tokens
    samples = given.prompts * 8
    text = f"""--hf-checkpoint {checkpoint} --save {directory / "run"} {place} --plugins {plugins} --rollout-batch-size {given.prompts}
        --n-samples-per-prompt 8 --num-rollout {steps} --rollout-max-response-len {tokens} --rollout-max-context-len {given.tokens + 72}
        --max-running-requests {samples} --use-dynamic-batch-size --max-tokens-per-gpu {given.max_tokens} --lr 1e-6 --seed 0
        --save-interval {given.save_interval}"""
    if given.separate:
        (directory / "long_tailed.py").write_text(LONG_TAILED)
        text += f" --custom-generate-function-path {directory / 'long_tailed.py'} --schedule {given.schedule}"
        text += " --max-weight-staleness 2 --stale-samples train" * (given.schedule == "async")
    if cpu:
        text += " --device cpu --sglang-max-total-tokens 8192"
    else:
        full = samples if given.separate else samples // 2
        text += f" {GPU} --sglang-cuda-graph-bs-decode {full // 4},{full}"
    if "fp8" in plugins:
        text += " --fp8-recipe blockwise" + " --backward-override dequantized" * (not given.warm)
    return [*text.split(), *workload(directory, given.prompts)]


def run_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of a run."""
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--separate", action="store_true", help="one rank and one engine on separate GPUs")
    parser.add_argument("--schedule", choices=("sync", "ahead", "async"), default="sync", help="with --separate")
    parser.add_argument("--warm", action="store_true", help="one step on one GPU, to compile kernels")
    parser.add_argument("--plugins", default="r3,tis,fp8,zero_copy")
    parser.add_argument("--gpu", default="H100", help="for the predictions")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="longest response")
    parser.add_argument("--long-tokens", type=int, default=768, help="longest response with --separate")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-interval", type=int, default=12)
    parser.add_argument("--kill-engine", type=int, default=5, help="after this many steps; 0: no kill")
    parser.add_argument("--kill-rank", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=280, help="then the run is stopped")
    parser.add_argument("--first", type=float, default=200, help="stopped earlier if no step is complete by then")
    parser.add_argument("--checkpoint", type=Path, help="directory of the model; made if it does not exist")
    parser.add_argument("--directory", type=Path, help="for the run's files (default: temporary files)")
    parser.add_argument("--out", type=Path, help="also write the parts here as they are measured")
    parser.add_argument("--logs", type=Path, help="write the logs of the run and its workers here")
    return parser
