"""A step of the embedded trainer on one GPU: seconds, share of the BF16 peak, and its kernels, with ``miles_embedded.kernels`` and without.

32 prompts x 8 samples of 64 + 256 tokens on the random BF16 models of ``sglang_engine.py``; the samples of a group share their prompt.
The share counts 6 operations per parameter in use (of experts the chosen ones; no embedding) and computed token, and 12 per layer, query
width and pair of query and key, nothing twice, against the dense peak of the data sheet. Sides take turns in one process. ``fp8``,
``fp8_linear`` (linear layers only) and ``fp8_emulated`` train a fake-quantised forward with native or emulated products; ``fp8_dgrad`` also quantises
the gradients of linear layers. ``torch`` keeps
the kernels that merge attention to a shared prompt; ``flash2`` computes attention with FlashAttention-2, where ``kernels`` may use cuDNN. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.engine.checkpoints import make_model
from benchmarks.engine.embedded_rollout import Result, breakdown
from benchmarks.measure import finish, installed, options
from miles_core.data import Sample, collate
from miles_core.precision.products import Products
from miles_core.trainer import Callbacks
from miles_embedded.model.load import load_model
from miles_embedded.model.operations import TORCH, use_operations
from miles_embedded.quantized.weights import install
from miles_embedded.trainer import flash
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_formats import FormatCodec
from miles_testing.yardstick import weighted

#: Dense BF16 operations per second by compute capability, from the data sheets (H100/H200, A100).
PEAK = {(9, 0): 989e12, (8, 0): 312e12}
PROMPT, RESPONSE, SAMPLES = 64, 256, 8
SIDES = ("torch", "kernels", "flash2", "fp8", "fp8_emulated", "fp8_linear", "fp8_dgrad")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=["dense", "moe", "8b-layers", "30b-layers", "tiny"], default="dense")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES[:2]))
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument(
        "--max-tokens", type=int, default=16384, help="computed tokens of a micro-batch (default: 16384)"
    )
    parser.add_argument("--turns", type=int, default=3, help="measured steps (default: 3)")
    parser.add_argument("--response", type=int, default=RESPONSE, help=f"tokens of a response (default: {RESPONSE})")
    parser.add_argument("--profile", action="store_true", help="kernels of one step by name")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--out", type=Path, help="write results here after every part")
    given = parser.parse_args()
    result = Result(given.out)
    with tempfile.TemporaryDirectory() as directory:
        measure(given, make_model(given.model, Path(directory)), result)
    finish(
        "embedded_training",
        result.found,
        given.save,
        lambda: installed("torch", "transformers"),
        given.model + given.variant,
    )


def measure(given: argparse.Namespace, checkpoint: Path, result: Result) -> None:
    """All parts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result.put("device", torch.cuda.get_device_name() if device == "cuda" else device)
    result.put("model", given.model)
    trainers = {side: make_trainer(side, checkpoint, device, given) for side in given.sides}
    batch = make_batch(given.groups, given.response)
    seconds: dict[str, list[float]] = {side: [] for side in trainers}
    for _ in range(given.turns + 1):
        for side, trainer in trainers.items():
            with mock.patch.object(flash, "cudnn_supports", lambda *_: False) if side == "flash2" else nullcontext():
                seconds[side].append(timed(trainer, batch))
    for side, trainer in trainers.items():
        took = statistics.median(seconds[side][1:])
        rate = operations(trainer.model, given.groups, given.response) / took
        found = {
            "seconds": round(took, 4),
            "all": [round(s, 4) for s in seconds[side]],
            "tflops": round(rate / 1e12, 1),
        }
        if device == "cuda":
            found["share_of_bf16_peak"] = round(rate / PEAK[torch.cuda.get_device_capability()], 3)
        result.put(side, found)
        if given.profile and device == "cuda":
            kinds = torch.profiler.ProfilerActivity
            with torch.profiler.profile(activities=[kinds.CUDA]) as profiler:
                wall = timed(trainer, batch)
            result.put(f"profile_{side}", breakdown(profiler, wall, 1))


def make_trainer(
    side: str, checkpoint: Path, device: str, given: argparse.Namespace, dtype: str = "bfloat16"
) -> EmbeddedTrainer:
    model = load_model(checkpoint, dtype, device)
    if side == "torch":
        use_operations(model, TORCH)
    trainer = EmbeddedTrainer(model, TrainerConfig(micro_batch_size=None, max_tokens=given.max_tokens))
    if side.startswith("fp8"):
        from miles_fp8.format import Fp8

        codec = FormatCodec(Fp8())
        product = Products("emulated" if side == "fp8_emulated" else "native").of(codec.format, model)
        install(model, codec, product, rounds_gradients=side == "fp8_dgrad", native_experts=side == "fp8")
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer


def make_batch(groups: int, response: int = RESPONSE) -> Any:
    """Random tokens with random weights for their log-probabilities."""
    draw, samples = np.random.default_rng(2), []
    for group in range(groups):
        prompt = draw.integers(2, 250, PROMPT).tolist()
        for sample in range(SAMPLES):
            tokens = prompt + draw.integers(2, 250, response).tolist()
            samples.append(
                Sample(tokens=tokens, response_length=response, group_index=group, index=group * SAMPLES + sample)
            )
    batch = collate(samples)
    batch.columns["weight"] = torch.from_numpy(draw.normal(size=len(batch.tokens))).float() / len(batch.tokens)
    return batch


def timed(trainer: EmbeddedTrainer, batch: Any) -> float:
    """Seconds of one step."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    trainer.step(batch, lr=1e-6)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def operations(model: Any, groups: int, response: int = RESPONSE) -> float:
    """Operations of a step."""
    config, used = model.config, 0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            continue
        share = config.num_experts_per_tok / config.num_experts if parameter.dim() == 3 else 1
        used += int(parameter.numel() * share)
    trained = groups * SAMPLES * response
    tokens = groups * PROMPT + trained
    heads = config.vocab_size * config.hidden_size
    width = config.num_attention_heads * config.head_dim
    pairs = groups * (PROMPT**2 / 2 + SAMPLES * (response * PROMPT + response**2 / 2))
    return 6.0 * ((used - heads) * tokens + heads * trained) + 12.0 * config.num_hidden_layers * width * pairs


if __name__ == "__main__":
    main()
