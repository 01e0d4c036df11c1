"""vLLM behind the engine contract: tokens a second against vLLM called directly, seconds of a weight sync, and log-probabilities against
Transformers.

The engine and direct calls alternate, and use the same vLLM process: its arguments, caches and compiled kernels are the same for both. A
random BF16 model (``--model dense`` .47 B, ``moe`` .94 B; ``tiny_dense`` rehearses the script on a CPU).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.engine.checkpoints import SIZES, VOCABULARY, make_model
from benchmarks.measure import finish, installed, options
from miles_core.data import Encoded
from miles_core.engine import Request, Sampling
from miles_formats import Codec
from miles_vllm import host
from miles_vllm.build import Choices, assemble
from miles_vllm.engine import VllmEngine

GIB = 1 << 30


class Measured(host.Host):
    """A process that also measures vLLM itself."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        super().__init__(arguments, environment)
        self._calls["direct"] = self.direct

    async def direct(self, prompts: Sequence[Sequence[int]], parameters: Mapping[str, Any]) -> float:
        """Seconds of all requests in calls of ``AsyncLLM.generate``."""
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        async def ask(number: int, tokens: Sequence[int]) -> None:
            sampling = SamplingParams(**parameters, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
            async for _ in self.llm.generate(TokensPrompt(prompt_token_ids=list(tokens)), sampling, f"direct-{number}"):
                pass

        started = time.perf_counter()
        await asyncio.gather(*(ask(number, tokens) for number, tokens in enumerate(prompts)))
        return time.perf_counter() - started


async def through(engine: VllmEngine, requests: Sequence[Request]) -> float:
    """Seconds of all requests through the engine contract."""
    started = time.perf_counter()
    await asyncio.gather(*(engine.generate(request) for request in requests))
    return time.perf_counter() - started


def units(checkpoint: Path, model: Any) -> Iterator[Encoded]:
    """Yield the tensors of a checkpoint as units of a sync, on the device and in the dtype of the model."""
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file, device=str(model.device)).items():
            yield Encoded(name, {name: tensor.to(model.dtype)})


async def measure(given: Any, checkpoint: Path, engine: VllmEngine) -> dict[str, Any]:
    """Measure a started engine."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="bfloat16" if device == "cuda" else "float32")
    model = model.to(device)
    syncs = []
    for version in range(4):
        started = time.perf_counter()
        await engine.update_weights(units(checkpoint, model), version)
        syncs.append(time.perf_counter() - started)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, VOCABULARY, (given.requests, given.prompt), generator=draw).tolist()
    requests = [Request(prompt, Sampling(given.tokens, ignore_eos=True), key=key) for key, prompt in enumerate(prompts)]
    response = await engine.generate(requests[0])
    sequence = torch.tensor([[*prompts[0], *response.tokens]], device=device)
    with torch.no_grad():
        scores = model(sequence).logits.float().log_softmax(-1)[0, :-1].gather(1, sequence[0, 1:, None])[:, 0]
    own = torch.tensor(list(response.log_probs), device=device)
    parameters = engine.settings.translator.parameters(requests[0])
    seconds: dict[str, list[float]] = {"engine": [], "direct": []}
    for turn in range(given.turns + 1):
        measured = {
            "engine": await through(engine, requests),
            "direct": await engine.link.call("direct", prompts, parameters),
        }
        for name, elapsed in measured.items():
            seconds[name] += [elapsed] if turn else []  # the first turn warms up
    made = given.requests * given.tokens
    speeds = {name: made / statistics.median(each) for name, each in seconds.items()}
    return {
        "tokens_per_second": speeds,
        "engine_over_direct": speeds["engine"] / speeds["direct"],
        "seconds": seconds,
        "sync_seconds": syncs,
        "sync_gb": sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9,
        "abs_log_prob_to_transformers": float((scores[given.prompt - 1 :] - own).abs().mean()),
    }


async def main(given: Any, directory: Path) -> dict[str, Any]:
    checkpoint, cuda = make_model(given.model, directory / "model"), torch.cuda.is_available()
    arguments = {"gpu_memory_utilization": 0.5} if cuda else {"kv_cache_memory_bytes": GIB}
    choices = Choices(
        arguments=arguments,
        device="cuda" if cuda else "cpu",
        max_context=given.prompt + given.tokens,
        max_running_requests=256,
    )
    engine = assemble(checkpoint, Codec(), str, directory, choices)
    host.NAME = f"{Measured.__module__}:{Measured.__name__}".replace("__main__", "benchmarks.engine.vllm_engine")
    started = time.perf_counter()
    await engine.start()
    try:
        return {"start_seconds": time.perf_counter() - started, **await measure(given, checkpoint, engine)}
    finally:
        await engine.stop()
        print(f"vLLM's output: {directory}/workers/{choices.name}.log")


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--model", default="dense", choices=tuple(SIZES))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a response")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    result = asyncio.run(main(given, Path(tempfile.mkdtemp(prefix="vllm-engine-"))))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found = {"model": given.model, "device": where, "requests": given.requests, "tokens": given.tokens, **result}
    finish("vllm_engine", found, given.save, lambda: installed("torch", "transformers", "vllm"), given.model)
