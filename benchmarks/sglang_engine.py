"""SGLang behind the engine contract: log-probabilities against Transformers, tokens a second against SGLang called directly,
seconds of a weight sync against the copy's limit, and what recording routed experts costs.

A random BF16 model (``--model dense`` .47 B, ``moe`` .94 B; ``tiny`` rehearses the script on a CPU), or a checkpoint's
directory. Results are written after every part, so a run that is cut off leaves what it measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import commit, finish, installed, options

from miles_core.backend import Codec, Encoded, Request, Sampling

SIZES: dict[str, dict[str, Any]] = {
    "dense": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 12},
    "moe": {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2},
}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "norm_topk_prob": True}
VOCABULARY = 32000


def make_model(kind: str, directory: Path) -> Path:
    """A random checkpoint with a tokenizer of one word an id."""
    import transformers
    from tokenizers import Tokenizer, models

    common = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 1}
    common |= {
        "head_dim": 64 if kind == "tiny" else 128,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **SIZES[kind],
    }
    if kind == "dense":
        config = transformers.Qwen3Config(**common, pad_token_id=0)
    else:
        config = transformers.Qwen3MoeConfig(**common, **EXPERTS, pad_token_id=0)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0").save_pretrained(
        directory
    )
    return directory


class Results:
    """What was measured so far, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, part: str, **numbers: Any) -> None:
        self.found[part] = numbers
        self.path.write_text(json.dumps(self.found, indent=1))
        print(f"{part}: {json.dumps(numbers)}", file=sys.stderr, flush=True)


def prompts(given: argparse.Namespace) -> list[list[int]]:
    """Groups of 8 requests share a prompt of 64 tokens."""
    generator = torch.Generator().manual_seed(1)
    groups = torch.randint(
        2, min(VOCABULARY, given.vocabulary), (given.requests // 8, 64), generator=generator
    ).tolist()
    return [group for group in groups for _ in range(8)]


async def generate(
    engine: Any, asked: list[list[int]], sampling: Sampling, extras: set[str]
) -> tuple[list[Any], float]:
    """(responses, seconds)."""
    requests = [Request(p, sampling, key=i, group=i // 8, extras=set(extras)) for i, p in enumerate(asked)]
    started = time.perf_counter()
    responses = await asyncio.gather(*(engine.generate(r) for r in requests))
    return responses, time.perf_counter() - started


async def throughput(engine: Any, given: argparse.Namespace, results: Results) -> None:
    """Tokens a second through the adapter, and with routed experts recorded, in turns."""
    sampling = Sampling(given.tokens, ignore_eos=True)
    kinds: dict[str, set[str]] = {"adapter": set()}
    if "routed_experts" in engine.capabilities:
        kinds["adapter_with_routes"] = {"rollout_routed_experts"}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(given.turns + 1):
        for kind, extras in kinds.items():
            _, took = await generate(engine, prompts(given), sampling, extras)
            if turn:
                seconds[kind].append(took)
    count = given.requests * given.tokens
    for kind, took in seconds.items():
        results.put(kind, tokens_per_second=round(count / statistics.median(took)), seconds=[round(s, 3) for s in took])


@torch.no_grad()
async def gap(engine: Any, checkpoint: Path, given: argparse.Namespace, results: Results) -> None:
    """Log-probabilities of the same tokens: SGLang's, and those of plain Transformers in BF16, alone and in batches."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = prompts(given)[::8][:32]
    responses, _ = await generate(engine, asked, Sampling(min(64, given.tokens), ignore_eos=True), set())
    sampled = torch.tensor([x for r in responses for x in r.log_probs])
    scored = await engine.score([p + r.tokens for p, r in zip(asked, responses, strict=True)])
    found = {"sglang": sampled}
    found["sglang_score"] = torch.tensor(
        [x for p, row in zip(asked, scored, strict=True) for x in row[len(p) - 1 :].tolist()]
    )
    ids = torch.tensor([p + r.tokens for p, r in zip(asked, responses, strict=True)], device=device)

    def of(model: Any, rows: int) -> torch.Tensor:
        out = []
        for piece in ids.split(rows):
            logits = model(piece[:, :-1]).logits[:, 63:].float()
            out.append(logits.log_softmax(-1).gather(-1, piece[:, 64:, None])[..., 0].flatten())
        return torch.cat(out).cpu()

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).to(device).eval()
    found["bf16_alone"], found["bf16_in_batches"] = of(model, 1), of(model, 8)
    found["fp32"] = of(model.float(), 4)
    pairs = [
        ("sglang", "bf16_alone"),
        ("sglang", "sglang_score"),
        ("bf16_in_batches", "bf16_alone"),
        ("sglang", "fp32"),
        ("bf16_alone", "fp32"),
    ]
    numbers = {}
    for a, b in pairs:
        difference = (found[a] - found[b]).abs()
        numbers[f"{a}-{b}"] = {"mean": round(float(difference.mean()), 5), "max": round(float(difference.max()), 4)}
    results.put("gap", tokens=len(sampled), **numbers)


async def sync(engine: Any, checkpoint: Path, results: Results) -> None:
    """Seconds of a complete update from tensors where the trainer has them, and that it is the one in force."""
    from safetensors.torch import load_file

    cuda = torch.cuda.is_available()
    tensors = {k: v.cuda() if cuda else v for k, v in load_file(checkpoint / "model.safetensors").items()}
    nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
    greedy, asked = Sampling(8, temperature=0.0, ignore_eos=True), [[5, 6, 7, 8, 9]] * 2
    before = (await generate(engine, asked, greedy, set()))[0][0]
    changed = {k: v * 1.05 if v.ndim > 1 else v for k, v in tensors.items()}

    async def push(which: dict[str, torch.Tensor]) -> float:
        started = time.perf_counter()
        await engine.pause("abort")
        await engine.update_weights((Encoded(k, {k: v}) for k, v in which.items()), engine.version + 1)
        await engine.resume()
        return time.perf_counter() - started

    first = await push(changed)
    other = (await generate(engine, asked, greedy, set()))[0][0]
    took = [await push(tensors) for _ in range(5)]
    again = (await generate(engine, asked, greedy, set()))[0][0]
    seconds = statistics.median(took)
    numbers: dict[str, Any] = {"bytes": nbytes, "seconds": round(seconds, 4), "first_seconds": round(first, 4)}
    numbers["gb_per_second"] = round(nbytes / seconds / 1e9, 2)
    numbers["weights_changed"] = other.log_probs != before.log_probs
    numbers["restored_gap"] = max(abs(a - b) for a, b in zip(again.log_probs, before.log_probs, strict=True))
    if cuda:
        big = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        copies = []
        for _ in range(4):
            torch.cuda.synchronize()
            started = time.perf_counter()
            big.clone()
            torch.cuda.synchronize()
            copies.append(time.perf_counter() - started)
        numbers["copy_gb_per_second"] = round(nbytes / min(copies[1:]) / 1e9, 1)
    results.put("sync", **numbers)


def direct(arguments: dict[str, Any], given: argparse.Namespace) -> None:
    """SGLang called directly, in this process: the same requests in one call, and as many calls side by side."""
    import sglang

    engine = sglang.Engine(**arguments)
    sampling = {"max_new_tokens": given.tokens, "temperature": 1.0, "ignore_eos": True}
    seconds = []
    for turn in range(given.turns + 1):
        started = time.perf_counter()
        engine.generate(input_ids=prompts(given), sampling_params=sampling, return_logprob=True)
        if turn:
            seconds.append(time.perf_counter() - started)
    print("DIRECT " + json.dumps(seconds), flush=True)
    engine.shutdown()


async def measured(checkpoint: Path, given: argparse.Namespace, results: Results, work: Path) -> dict[str, Any]:
    """Everything that goes through the adapter; returns the arguments SGLang was started with."""
    from miles_sglang.build import Choices, assemble

    cuda = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "max_total_tokens": 200_000 if cuda else 8192,
        "enable_return_routed_experts": given.model != "dense",
    }
    if given.model not in SIZES:
        arguments["enable_return_routed_experts"] = False
    if cuda:
        arguments |= {"attention_backend": "triton", "sampling_backend": "pytorch", "mem_fraction_static": 0.3}
        arguments |= {"moe_runner_backend": "triton", "cuda_graph_max_bs_decode": 256}
        arguments["disable_prefill_cuda_graph"] = True
        if given.eager:
            arguments["disable_cuda_graph"] = True
    choices = Choices(arguments=arguments, device="cuda" if cuda else "cpu", max_context=2048, startup_timeout=400)
    engine = assemble(checkpoint, Codec(), lambda tokens: "", work, choices)
    started = time.perf_counter()
    await engine.start()
    results.put("start", seconds=round(time.perf_counter() - started, 1), info=dict(engine._info))
    try:
        await gap(engine, checkpoint, given, results)
        await throughput(engine, given, results)
        await sync(engine, checkpoint, results)
    finally:
        started = time.perf_counter()
        await engine.stop()
        results.put("stop", seconds=round(time.perf_counter() - started, 1))
    return engine.link.arguments  # type: ignore[attr-defined,no-any-return]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="dense", help="dense, moe, tiny or a checkpoint's directory")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--out", type=Path, default=Path("sglang_engine.json"))
    parser.add_argument("--direct", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.vocabulary = VOCABULARY
    if given.direct:
        direct(json.loads(given.direct), given)
        return
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results = Results(given.out)
    work = Path(tempfile.mkdtemp())
    checkpoint = make_model(given.model, work / "model") if given.model in SIZES else Path(given.model)
    try:
        arguments = asyncio.run(measured(checkpoint, given, results, work / "engine"))
    except BaseException:
        log = work / "engine" / "sglang.log"
        print(log.read_text()[-6000:] if log.exists() else "no log", file=sys.stderr)
        raise
    command = [sys.executable, __file__, "--direct", json.dumps(arguments), "--requests", str(given.requests)]
    command += ["--tokens", str(given.tokens), "--turns", str(given.turns)]
    environment = os.environ | {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if not torch.cuda.is_available():
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    line = next((x for x in done.stdout.splitlines() if x.startswith("DIRECT ")), None)
    if line is None:
        sys.exit(f"SGLang called directly failed:\n{done.stdout[-2000:]}")
    seconds = json.loads(line.removeprefix("DIRECT "))
    rate = given.requests * given.tokens / statistics.median(seconds)
    results.put("direct", tokens_per_second=round(rate), seconds=[round(s, 3) for s in seconds])
    results.put("ratio", adapter_to_direct=round(results.found["adapter"]["tokens_per_second"] / rate, 4))
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    finish(
        "sglang_engine",
        {"model": given.model, "gpu": gpu, "commit": commit(), **results.found},
        given.save,
        lambda: installed("torch", "transformers", "sglang"),
        given.model if given.model in SIZES else "real",
    )


if __name__ == "__main__":
    main()
