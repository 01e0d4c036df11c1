"""SGLang behind the engine contract: log-probabilities against Transformers, tokens a second against SGLang called directly,
seconds of a weight sync against the copy's limit, and what recording routed experts costs.

SGLang is asked directly in the process in which the engine has it (``sglang_direct.py``), so that both have the same arguments,
caches and compiled kernels.

A random BF16 model (``--model dense`` .47 B, ``moe`` .94 B; ``tiny`` rehearses the script on a CPU), or a checkpoint's
directory. Results are written after every part, so a run that is cut off leaves what it measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine.checkpoints import SIZES, VOCABULARY, make_model
from benchmarks.measure import commit, finish, installed, options
from miles_core.data import Sample, WeightUnit, collate
from miles_core.engine import Request, Sampling
from miles_core.trainer import Callbacks
from miles_formats import Codec, FormatCodec


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


#: How SGLang is asked directly -> what differs from one call for all requests, with log-probabilities.
DIRECT: dict[str, dict[str, bool]] = {
    "direct": {},
    "direct_each": {"each": True},
    "direct_without_log_probs": {"log_probs": False},
    "direct_with_routes": {"routes": True},
    "direct_full_cache": {},
}
ADAPTER: dict[str, set[str]] = {
    "adapter": set(),
    "adapter_with_routes": {"rollout_routed_experts"},
    "adapter_full_cache": set(),
}


async def rate(engine: Any, given: argparse.Namespace, results: Results) -> None:
    """Tokens a second of the same requests in the same SGLang: asked directly, and through the adapter, in turns; one thing
    differs at a time. The prefix cache is empty before each, as after a sync, but for ``full_cache``: these come last, when it
    has been filled, and SGLang evicts while it decodes."""
    routes = "routed_experts" in engine.capabilities
    kinds = [k for k in (*DIRECT, *ADAPTER) if routes or "routes" not in k]
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    full = [kind for kind in kinds if "full" in kind]
    for turn in range(given.turns + 1):
        for kind in kinds:
            if kind not in full:
                await engine.link.call("flush_cache", {})
                seconds[kind].append(await once(engine, kind, given))
                if turn == 0:
                    results.put(f"first_{kind}", seconds=round(seconds[kind].pop(), 3))
    await engine.link.call("flush_cache", {})
    for kind in (full * (given.turns + 3))[: len(full) * (given.turns + 3)]:
        seconds[kind].append(await once(engine, kind, given))
    count = given.requests * given.tokens
    for kind, took in seconds.items():
        took = took[-given.turns :]
        results.put(kind, tokens_per_second=round(count / statistics.median(took)), seconds=[round(s, 3) for s in took])
    rates = {kind: results.found[kind]["tokens_per_second"] for kind in kinds}
    results.put("to_direct", **{kind: round(value / rates["direct"], 4) for kind, value in rates.items()})


async def once(engine: Any, kind: str, given: argparse.Namespace) -> float:
    """Seconds of one rollout."""
    if kind in ADAPTER:
        _, took = await generate(engine, prompts(given), Sampling(given.tokens, ignore_eos=True), ADAPTER[kind])
        return took
    sampling = {"max_new_tokens": given.tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"prompts": prompts(given), "sampling": sampling, "each": False, "log_probs": True, "routes": False}
    return float(await engine.link.call("direct", body | DIRECT[kind]))


@torch.no_grad()
async def gap(engine: Any, checkpoint: Path, given: argparse.Namespace, results: Results) -> None:
    """Log-probabilities of the same tokens: SGLang's, and those of the embedded trainer in the same number format, alone and in
    batches."""
    from miles_embedded import load_model
    from miles_embedded.quantized.weights import install
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    asked = prompts(given)[::8][:32]
    responses, _ = await generate(engine, asked, Sampling(min(64, given.tokens), ignore_eos=True), set())
    sampled = torch.tensor([x for r in responses for x in r.log_probs])
    scored = await engine.score([p + r.tokens for p, r in zip(asked, responses, strict=True)])
    alone = [(await engine.score([p + r.tokens]))[0] for p, r in zip(asked, responses, strict=True)]
    found = {"sglang": sampled}
    for name, rows in (("sglang_score", scored), ("sglang_score_alone", alone)):
        found[name] = torch.tensor([x for p, row in zip(asked, rows, strict=True) for x in row[len(p) - 1 :].tolist()])
    batch = collate(
        [Sample(tokens=p + r.tokens, response_length=len(r.tokens), loss_mask=[1] * len(r.tokens), index=i, group_index=i)
         for i, (p, r) in enumerate(zip(asked, responses, strict=True))]
    )  # fmt: skip

    def of(model: Any, rows: int) -> torch.Tensor:
        trainer = EmbeddedTrainer(model, TrainerConfig(micro_batch_size=rows))
        trainer.bind(Callbacks(trainer.forward, lambda *_: None, trainer.optimizer_step))  # type: ignore[arg-type, return-value]
        return trainer.log_probs(batch, "old")["log_probs"].float().cpu()[batch.mask != 0]

    model = load_model(checkpoint, torch.bfloat16).to(device)
    if given.precision != "bf16":
        found["bf16"] = of(model, 8)  # what the number format itself changes
        install(model, codec_of(given))
    found["trainer_alone"], found["trainer_in_batches"] = of(model, 1), of(model, 8)
    if given.precision == "bf16":
        found["trainer_fp32"] = of(model.float(), 4)
    pairs = [
        ("sglang", "trainer_alone"),
        ("sglang", "sglang_score"),
        ("sglang_score", "sglang_score_alone"),
        ("sglang_score_alone", "trainer_alone"),
        ("trainer_in_batches", "trainer_alone"),
        ("sglang", "trainer_fp32"),
        ("trainer_alone", "trainer_fp32"),
        ("bf16", "trainer_alone"),
    ]
    numbers = {}
    for a, b in (pair for pair in pairs if found.keys() >= set(pair)):
        difference = (found[a] - found[b]).abs()
        numbers[f"{a}-{b}"] = {"mean": round(float(difference.mean()), 5), "max": round(float(difference.max()), 4)}
    results.put("gap", tokens=len(sampled), **numbers)


def codec_of(given: argparse.Namespace) -> Codec:
    """Of the weights that SGLang is given."""
    if given.precision == "bf16":
        return Codec()
    if given.precision == "int4":
        from miles_int4.format import Int4

        return FormatCodec(Int4())
    from miles_fp8.format import Fp8

    return FormatCodec(Fp8())


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors, where a trainer would have them."""
    from safetensors.torch import load_file

    files = [load_file(file) for file in sorted(checkpoint.glob("*.safetensors"))]
    return {k: v.cuda() if torch.cuda.is_available() else v for file in files for k, v in file.items()}


async def sync(engine: Any, checkpoint: Path, given: argparse.Namespace, results: Results) -> None:
    """Seconds of a complete update from tensors where the trainer has them, and that it is the one in force."""
    cuda, codec, tensors = torch.cuda.is_available(), codec_of(given), tensors_of(checkpoint)
    nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
    greedy, asked = Sampling(8, temperature=0.0, ignore_eos=True), [[5, 6, 7, 8, 9]] * 2
    before = (await generate(engine, asked, greedy, set()))[0][0]
    changed = {k: v * 1.05 if v.ndim > 1 else v for k, v in tensors.items()}

    def units(which: dict[str, torch.Tensor]) -> Iterator[WeightUnit]:
        return (WeightUnit({k: v}, lasting=True) for k, v in which.items())

    async def push(which: dict[str, torch.Tensor]) -> float:
        started = time.perf_counter()
        await engine.pause("abort")
        await engine.update_weights(codec.encode(units(which)), engine.version + 1)
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
    same = next((i for i, pair in enumerate(zip(again.tokens, before.tokens, strict=True)) if pair[0] != pair[1]), 8)
    numbers["restored_tokens"] = same  # of 8; after another choice the rest is another text
    numbers["restored_gap"] = max(
        [abs(a - b) for a, b in zip(again.log_probs[:same], before.log_probs, strict=False)], default=0.0
    )
    if cuda:
        started = time.perf_counter()
        for _ in codec.encode(units(tensors)):
            pass
        torch.cuda.synchronize()
        numbers["encode_seconds"] = round(time.perf_counter() - started, 4)
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


def server_arguments(given: argparse.Namespace) -> dict[str, Any]:
    """What SGLang is started with."""
    routes = getattr(given, "routes", True)
    if not torch.cuda.is_available():
        return {"max_total_tokens": 8192, "enable_return_routed_experts": routes and given.model in ("moe", "tiny")}
    arguments: dict[str, Any] = {
        "max_total_tokens": getattr(given, "cached_tokens", 200_000),
        "enable_return_routed_experts": routes and given.model == "moe",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "mem_fraction_static": getattr(given, "share", 0.3),
        "moe_runner_backend": "triton",
        "cuda_graph_bs_decode": getattr(given, "batches", [16, 64, 128, 192, 256]),
        "disable_prefill_cuda_graph": True,
    }
    if given.model == "hybrid":
        arguments["max_mamba_cache_size"] = 4 * max(arguments["cuda_graph_bs_decode"])
    if given.fp8_gemm:
        arguments["fp8_gemm_runner_backend"] = given.fp8_gemm
    if given.eager:
        arguments["disable_cuda_graph"] = True
    if given.deterministic:
        arguments["enable_deterministic_inference"] = True
    return arguments


def engine_for(checkpoint: Path, given: argparse.Namespace, work: Path) -> Any:
    """The engine, whose process is that of ``sglang_direct``."""
    from miles_sglang.build import assemble
    from miles_sglang.choices import Choices

    device = "cuda" if torch.cuda.is_available() else "cpu"
    python_path = getattr(given, "sglang_python_path", "")
    choices = Choices(
        arguments=server_arguments(given),
        device=device,
        max_context=2048,
        startup_timeout=400,
        bucket_bytes=given.bucket << 20,
        python_path=python_path,
        routed_dtype="int8",  # as r3 declares it for at most 128 experts
    )
    engine = assemble(checkpoint, codec_of(given), lambda tokens: "", work, choices)
    engine.link.worker = "sglang_direct"  # type: ignore[attr-defined]
    engine.link.changes["PYTHONPATH"] = os.pathsep.join(  # type: ignore[attr-defined]
        filter(None, [str(Path(__file__).parent), python_path, os.environ.get("PYTHONPATH")])
    )
    return engine


async def measure(checkpoint: Path, given: argparse.Namespace, results: Results, work: Path) -> None:
    """Everything, in one start of SGLang."""
    engine = engine_for(checkpoint, given, work)
    started = time.perf_counter()
    await engine.start()
    results.put("start", seconds=round(time.perf_counter() - started, 1), info=dict(engine._info))
    parts = {"gap": gap, "sync": sync}
    try:
        if given.precision != "bf16":
            await given_weights(engine, checkpoint, given, results)
        for part in given.parts.split(","):
            if part == "rate":
                await rate(engine, given, results)
            else:
                await parts[part](engine, checkpoint, given, results)
    finally:
        started = time.perf_counter()
        await engine.stop()
        results.put("stop", seconds=round(time.perf_counter() - started, 1))


async def given_weights(engine: Any, checkpoint: Path, given: argparse.Namespace, results: Results) -> None:
    """The checkpoint's weights in the number format, and how both sides' quantisers agree."""
    from miles_core.mismatch.parity import check

    codec = codec_of(given)
    started = time.perf_counter()
    await engine.update_weights(codec.encode(WeightUnit({k: v}) for k, v in tensors_of(checkpoint).items()), 0)
    results.put(
        "first_weights", seconds=round(time.perf_counter() - started, 2), how=engine.hot_update(given.precision)
    )
    quantizer = engine.quantizer(codec.format)
    if quantizer is not None:
        results.put("parity", **check("sglang", codec.format, quantizer).to_dict())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="dense", help="dense, moe, tiny or a checkpoint's directory")
    parser.add_argument("--parts", default="gap,rate,sync", help="what to measure, of these")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--precision", choices=("bf16", "fp8", "int4"), default="bf16", help="of SGLang's weights")
    parser.add_argument("--deterministic", action="store_true", help="SGLang's deterministic inference")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--fp8-gemm", help="SGLang's kernels for FP8 products; its own choice compiles for minutes")
    parser.add_argument("--bucket", type=int, default=512, help="MiB of weights that travel together")
    parser.add_argument("--out", type=Path, default=Path("sglang_engine.json"))
    given = parser.parse_args()
    given.vocabulary = VOCABULARY
    import logging

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    results = Results(given.out)
    work = Path(tempfile.mkdtemp())
    checkpoint = make_model(given.model, work / "model") if given.model in SIZES else Path(given.model)
    try:
        asyncio.run(measure(checkpoint, given, results, work / "engine"))
    except BaseException:
        log = work / "engine" / "sglang.log"
        print(log.read_text()[-6000:] if log.exists() else "no log", file=sys.stderr)
        raise
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    name = given.model if given.model in SIZES else "real"
    finish(
        "sglang_engine",
        {"model": name, "precision": given.precision, "gpu": gpu, "commit": commit(), **results.found},
        given.save,
        lambda: installed("torch", "transformers", "sglang"),
        "-".join([name, given.precision, *(["deterministic"] if given.deterministic else [])]),
    )


if __name__ == "__main__":
    main()
