"""The native product of FP8 codes against the emulated one: single matrices, and a model's engine and trainer.

Matrices: microseconds on the GPU of one linear layer's forward, in turns: BF16, emulated (the rounding kernel, then
the BF16 product with dequantised weights, as a layer computes it) and native (the quantising kernel, then the product of
codes), over rows and shapes of language models; and the relative root mean square distance of both from the exact
product of the codes, and from each other.

Model: a random Qwen3 in BF16 with the layers of an 8 B model, fewer of them. Tokens a second of the embedded engine
generating, and scoring whole sequences; seconds of a trainer's step (forward, backward, optimiser, weights quantised
again); and the mean |difference of log-probabilities| of the engine's own tokens between every engine and every trainer.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.measure import finish, installed, options
from miles_core.contracts.engine import Request, Response, Sampling
from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import Batch, collate
from miles_core.data.sample import Sample
from miles_core.precision.codec import Codec
from miles_core.precision.products import Products, emulate_product
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.model.load import NAME, prepare
from miles_embedded.model.views import export
from miles_embedded.quantized.weights import install
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_formats.codec import FormatCodec
from miles_formats.convert.installed import format_class
from miles_testing.yardstick import weighted

ROWS = (1, 64, 256, 1024, 4096, 8192)
SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
SIDES = ("bf16", "emulated", "native")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", help="of the model copy (default: bfloat16)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--turns", type=int, default=7, help="measured turns (default: 7)")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 512], help="requests in flight")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--response", type=int, default=96, help="tokens of a response")
    parser.add_argument("--sequences", type=int, default=16, help="sequences of a scoring pass and a training step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each of them")
    given = parser.parse_args()
    result = {
        "device": torch.cuda.get_device_name() if given.device == "cuda" else given.device,
        "products": products(given),
        "model": model_results(given),
    }
    finish("quantized_product", result, given.save, lambda: installed("torch", "triton", "transformers", "miles-core"))


# -- matrices -----------------------------------------------------------------------------------------------------------


def products(given: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a shape and number of rows."""
    format, device, dtype = format_class("fp8")(), torch.device(given.device), getattr(torch, given.dtype)
    product, rows = format.product(device, dtype), []
    generator = torch.Generator(device).manual_seed(0)
    shapes = SHAPES if given.hidden == 4096 else ((given.hidden, given.intermediate),)
    for n, k in shapes:
        parts = format.quantize(torch.randn(n, k, device=device, generator=generator).to(dtype))
        weight, codes = format.dequantize(parts).to(dtype), product.prepare(parts)
        for m in given.rows:
            x = torch.randn(m, k, device=device, generator=generator).to(dtype)
            runs: dict[str, Callable[[], object]] = {
                "bf16": lambda x=x, weight=weight: nn.functional.linear(x, weight),
                "emulated": lambda x=x, weight=weight: nn.functional.linear(format.fake_quantize_activation(x), weight),
                "native": lambda x=x, codes=codes: product(x, codes),
            }
            us = {side: 1e6 * statistics.median(t) for side, t in in_turns(runs, given.turns, device).items()}
            row = {"m": m, "n": n, "k": k, "us": {side: round(value, 1) for side, value in us.items()}}
            row["native_over_emulated"] = round(us["emulated"] / us["native"], 2)
            row["native_over_bf16"] = round(us["bf16"] / us["native"], 2)
            rows.append(row | distances(format, product, x[:256], parts))
            print(row, file=sys.stderr, flush=True)
    return rows


def distances(format: Any, product: Any, x: torch.Tensor, parts: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative RMS distances, of up to 256 rows."""
    exact = format.fake_quantize_activation(x.float()).double() @ format.dequantize(parts).double().T
    native, near = product(x, product.prepare(parts)).double(), emulate_product(format, x, parts).double()
    return {
        "native_from_exact": float(f"{(native - exact).norm() / exact.norm():.2e}"),
        "emulated_from_exact": float(f"{(near - exact).norm() / exact.norm():.2e}"),
        "native_from_emulated": float(f"{(native - near).norm() / near.norm():.2e}"),
    }


def in_turns(runs: dict[str, Callable[[], object]], turns: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each on the device, without what the host does before a launch; the first two turns are not kept."""
    found: dict[str, list[float]] = {side: [] for side in runs}
    for turn in range(turns + 2):
        for side, run in runs.items():
            seconds = on_gpu(run) if device.type == "cuda" else on_cpu(run)
            if turn >= 2:
                found[side].append(seconds)
    return found


def on_gpu(run: Callable[[], object], count: int = 10) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4_000_000)  # about 2 ms, in which the host gets ahead
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def on_cpu(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


# -- a model ------------------------------------------------------------------------------------------------------------


def model_results(given: argparse.Namespace) -> dict[str, Any]:
    """Engine and trainer, each as BF16, emulated and native."""
    base = random_model(given)
    codec, encoded = FormatCodec(format_class("fp8")()), Codec()
    engines = {}
    for side in SIDES:
        used = encoded if side == "bf16" else codec
        wanted = "native" if side == "native" else "emulated"
        settings = Settings(str, codec=used, products=Products(wanted), max_running_requests=max(given.requests))
        engines[side] = EmbeddedEngine(copy.deepcopy(base), settings)
        asyncio.run(engines[side].update_weights(used.encode(export(base)), 0))
    requests = {n: generating(engines, n, given) for n in given.requests}
    responses = {side: requests[max(given.requests)][1][side] for side in SIDES}
    scoring = score_texts(engines, given)
    del engines
    gaps, steps = {}, {}
    for side in SIDES:
        trainer = make_trainer(copy.deepcopy(base), side, codec)
        gaps[side] = {engine: gap(trainer, r, given) for engine, r in responses.items()}
        steps[side] = trained(trainer, given)
        del trainer
    parameters = sum(p.numel() for p in base.parameters())
    sizes = ("hidden", "intermediate", "layers", "vocabulary", "prompt", "response", "sequences", "length")
    return {
        "parameters": parameters,
        **{name: getattr(given, name) for name in sizes},
        "generate_tokens_per_second": {str(n): rates for n, (rates, _) in requests.items()},
        "score_tokens_per_second": scoring,
        "train_step_seconds": steps,
        "mean_abs_log_prob_difference": {
            f"trainer {t}": {f"engine {e}": v for e, v in row.items()} for t, row in gaps.items()
        },
    }


def random_model(given: argparse.Namespace) -> nn.Module:
    """With weights of standard deviation 1 / sqrt(K), made on the device."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    heads = given.hidden // 128
    config = Qwen3Config(
        hidden_size=given.hidden,
        intermediate_size=given.intermediate,
        num_hidden_layers=given.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        head_dim=128,
        vocab_size=given.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(given.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, given.dtype), attn_implementation=NAME)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
    return prepare(model)


def generating(
    engines: dict[str, EmbeddedEngine], count: int, given: argparse.Namespace
) -> tuple[dict[str, float], dict[str, list[tuple[list[int], Response]]]]:
    """Tokens a second of each with ``count`` requests in flight (median of three turns after one), and the last answers."""
    random, rates = np.random.default_rng(0), {side: [] for side in engines}
    prompts = random.integers(1, given.vocabulary, (count, given.prompt)).tolist()
    answers: dict[str, list[tuple[list[int], Response]]] = {}
    for turn in range(4):
        for side, engine in engines.items():
            sampling = Sampling(given.response)
            started = time.perf_counter()
            found = asyncio.run(all_of(engine, [Request(p, sampling, key=i) for i, p in enumerate(prompts)]))
            seconds = time.perf_counter() - started
            if turn:
                rates[side].append(sum(len(r.tokens) for r in found) / seconds)
            answers[side] = list(zip(prompts, found, strict=True))
    medians = {side: round(statistics.median(r)) for side, r in rates.items()}
    print(count, medians, file=sys.stderr, flush=True)
    return medians, answers


async def all_of(engine: EmbeddedEngine, requests: list[Request]) -> Sequence[Response]:
    await engine.start()
    found = await asyncio.gather(*(engine.generate(r) for r in requests))
    await engine.sleep(["cache"])
    return found


def score_texts(engines: dict[str, EmbeddedEngine], given: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of scoring whole sequences."""
    random, rates = np.random.default_rng(1), {side: [] for side in engines}
    sequences = random.integers(1, given.vocabulary, (given.sequences, given.length)).tolist()
    for turn in range(4):
        for side, engine in engines.items():
            started = time.perf_counter()
            asyncio.run(engine.score(sequences))
            if turn:
                rates[side].append(given.sequences * given.length / (time.perf_counter() - started))
    found = {side: round(statistics.median(r)) for side, r in rates.items()}
    print("score", found, file=sys.stderr, flush=True)
    return found


def make_trainer(model: nn.Module, side: str, codec: Codec) -> EmbeddedTrainer:
    """``side`` as for the engines."""
    if side != "bf16":
        wanted = Products("native" if side == "native" else "emulated")
        install(model, codec, wanted.of(codec.format, model))
    trainer = EmbeddedTrainer(model, TrainerConfig(micro_batch_size=None, max_tokens=16384))
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer


def gap(trainer: EmbeddedTrainer, answers: list[tuple[list[int], Response]], given: argparse.Namespace) -> float:
    """Mean |log p(engine) - log p(trainer)| of the engine's tokens, nats."""
    samples = [
        Sample(tokens=[*p, *r.tokens], response_length=len(r.tokens), group_index=i, index=i)
        for i, (p, r) in enumerate(answers)
    ]
    batch = collate(samples)
    found = trainer.log_probs(batch, "old")["log_probs"]
    differences = []
    for i, (prompt, response) in enumerate(answers):
        own = found[batch.starts[i] + len(prompt) : batch.starts[i] + int(batch.lengths[i])].cpu().double()
        differences.append((own - torch.tensor(response.log_probs, dtype=torch.float64)).abs())
    return float(f"{torch.cat(differences).mean():.2e}")


def trained(trainer: EmbeddedTrainer, given: argparse.Namespace) -> float:
    """Median seconds of three steps after one, on random sequences with random weights for their log-probabilities."""
    batch, seconds = random_batch(given), []
    for turn in range(4):
        started = time.perf_counter()
        trainer.step(batch, lr=1e-6)
        if given.device == "cuda":
            torch.cuda.synchronize()
        if turn:
            seconds.append(time.perf_counter() - started)
    print("step", seconds, file=sys.stderr, flush=True)
    return round(statistics.median(seconds), 4)


def random_batch(given: argparse.Namespace) -> Batch:
    random = np.random.default_rng(2)
    tokens = random.integers(1, given.vocabulary, (given.sequences, given.length)).tolist()
    batch = collate(
        [Sample(tokens=t, response_length=given.length // 2, group_index=i, index=i) for i, t in enumerate(tokens)]
    )
    batch.columns["weight"] = torch.from_numpy(random.normal(size=len(batch.tokens))).float() / len(batch.tokens)
    return batch


if __name__ == "__main__":
    main()
