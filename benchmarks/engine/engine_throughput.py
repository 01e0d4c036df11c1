"""Tokens per second of the embedded engine against Transformers: ``generate`` and continuous batching, taking turns.

512 requests (64 prompts x 8 samples) on the 1.8 M-parameter model in FP32, sampled at temperature 1 until the end token or
the limit. Each side runs in its own process and is given all requests of a turn at once. ``generate`` gets one padded
batch and Transformers' grouped experts; continuous batching a cache that holds every request. The engine also returns
log-probabilities, the others are not asked to. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Reporter, Worker, alternate, finish, installed, medians, options, spread

PROMPTS, SAMPLES = 64, 8
PAGE = 32  # tokens in a page of the continuous batching cache; a sequence here has 70
Generate = Callable[[list[list[int]], int], int]


def embedded(checkpoint: str, limit: int, kernels: bool) -> Generate:
    """The embedded engine: all requests at once, its own batching; ``kernels``: as with ``--plugins cpu_kernels``."""
    from transformers import AutoTokenizer

    from miles_core.contracts.engine import Request, Sampling
    from miles_embedded.engine.build import end_tokens
    from miles_embedded.engine.detokenizer import Detokenizer
    from miles_embedded.engine.engine import EmbeddedEngine
    from miles_embedded.engine.settings import Settings
    from miles_embedded.model.load import load_model

    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), load_model(checkpoint, "float32")
    if kernels:
        from miles_cpu_kernels.hooks import use_kernels

        use_kernels(model)
    settings = Settings(Detokenizer(tokenizer), end_tokens(model, tokenizer), max_running_requests=PROMPTS * SAMPLES)
    engine = EmbeddedEngine(model, settings)
    sampling = Sampling(max_new_tokens=limit)

    def generate(prompts: list[list[int]], turn: int) -> int:
        requests = [Request(tokens, sampling, key=turn * len(prompts) + i) for i, tokens in enumerate(prompts)]

        async def all_of_them() -> list[Any]:
            await engine.start()
            return await asyncio.gather(*(engine.generate(r) for r in requests))

        return sum(len(r.tokens) for r in asyncio.run(all_of_them()))

    return generate


def transformers(checkpoint: str, limit: int, continuous: bool) -> Generate:
    """``generate`` on one padded batch, or ``generate_batch``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    attention = {} if continuous else {"attn_implementation": "sdpa"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **attention).eval()
    config = GenerationConfig(
        max_new_tokens=limit,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )

    @torch.inference_mode()
    def padded(prompts: list[list[int]], turn: int) -> int:
        batch = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        out = model.generate(**batch, generation_config=config)[:, batch["input_ids"].shape[1] :]
        ended = (out == tokenizer.eos_token_id).cumsum(1)
        return int(((ended == 0) | ((ended == 1) & (out == tokenizer.eos_token_id))).sum())

    def batched(prompts: list[list[int]], turn: int) -> int:
        # Left to itself it sizes its cache by free memory and takes all of it; this holds every request of a turn.
        pages = sum(-(-(len(tokens) + limit) // PAGE) for tokens in prompts)
        batching = ContinuousBatchingConfig(page_size=PAGE, num_blocks=pages + 8, max_batch_tokens=4096)
        found = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, persistent_manager=True
        )
        if len(found) != len(prompts):
            raise RuntimeError(f"continuous batching answered {len(found)} of {len(prompts)} requests")
        return sum(len(output.generated_tokens) for output in found.values())

    return batched if continuous else padded


def work(side: str, checkpoint: str, prompt_file: str, limit: int, reporter: Reporter) -> None:
    """Generate one batch a turn."""
    import json

    made = {
        "miles": lambda: embedded(checkpoint, limit, kernels=False),
        "miles_cpu_kernels": lambda: embedded(checkpoint, limit, kernels=True),
        "generate": lambda: transformers(checkpoint, limit, continuous=False),
        "continuous": lambda: transformers(checkpoint, limit, continuous=True),
    }
    generate = made[side]()
    prompts = [list(json.loads(line)["prompt"].encode()) for line in Path(prompt_file).read_text().splitlines()]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    order = random.Random(0)
    reporter.send(ready=True)
    turn = 0
    while True:
        reporter.wait()
        chosen = [tokenizer.encode(bytes(p).decode()) for p in order.sample(prompts, PROMPTS)]
        requests = [tokens for tokens in chosen for _ in range(SAMPLES)]
        started = time.perf_counter()
        tokens = generate(requests, turn)
        seconds = time.perf_counter() - started
        turn += 1
        reporter.send(seconds=seconds, tokens=tokens, tokens_per_second=tokens / seconds)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=7, help="measured batches of each side")
    parser.add_argument("--warm-up", type=int, default=2, help="unmeasured batches of each side")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens at most")
    parser.add_argument("--shots", type=int, default=0, help="worked examples before each prompt (about 9 tokens each)")
    sides = ["miles", "miles_cpu_kernels", "generate", "continuous"]
    parser.add_argument("--sides", nargs="+", default=sides, help="what to measure")
    for name in ("--worker", "--checkpoint", "--prompts"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.worker, given.checkpoint, given.prompts, given.tokens, Reporter())
        return
    from benchmarks.training.workload import make_workload

    with tempfile.TemporaryDirectory() as directory:
        made = make_workload(Path(directory), given.shots)
        common = ["--checkpoint", str(made.checkpoint), "--prompts", str(made.prompt_file)]
        base = [sys.executable, str(Path(__file__).resolve()), *common, "--tokens", str(given.tokens), "--worker"]
        workers = [Worker(side, [*base, side], given.threads) for side in given.sides]
        try:
            reports = alternate(workers, given.turns, given.warm_up)
        finally:
            for worker in workers:
                worker.close()
    sides = {name: medians(r) | {"range": spread(r)} for name, r in reports.items()}
    ours = sides.get("miles", {}).get("tokens_per_second", 0.0)
    result = {
        "workload": {
            "requests": PROMPTS * SAMPLES,
            "max_new_tokens": given.tokens,
            "prompt_tokens": round(sum(len(p.encode()) for p in made.prompts) / len(made.prompts), 1),
            "threads": given.threads,
            "turns": given.turns,
        },
        "sides": sides,
        "times_faster": {n: round(ours / s["tokens_per_second"], 2) for n, s in sides.items() if n != "miles"},
    }
    finish("engine_throughput", result, given.save, lambda: installed("miles-core", "torch", "transformers"))


if __name__ == "__main__":
    main()
