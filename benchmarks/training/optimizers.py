"""Optimizers: memory of their state, seconds of a step, and the reward of a toy task after some steps.

Run on a CPU: ``python benchmarks/training/optimizers.py --save``; on a GPU: ``python benchmarks/training/optimizers.py --model dense --groups 16
--parts step --save --variant gpu`` (needs ``plugins/optimizers`` and torchao). Two parts:

- ``step``: a random BF16 model (``--model``, as in ``sglang_engine.py``), each optimizer in a process of its own, forked from one that has imported
  the packages. Bytes of FP32 masters and
  optimizer state on the device between steps and during a step, bytes in a checkpoint, seconds of the optimizer step and of the whole step
  (medians of ``--turns`` after two that warm up), and on a GPU the largest allocated memory of a whole step.
  ``offloaded``: with ``--offload-optimizer``; ``recomputed``: with ``--recompute-activations``; ``fp16``: an
  FP16 model with loss scaling. A side that fails is a result, too.
- ``learning``: toy runs in BF16 (the share of even tokens in a response is its reward) with each optimizer at one learning rate; mean reward of the
  first and last five steps, for each seed. The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import finish, installed, options
from benchmarks.training.forked import Clock, in_fork
from benchmarks.training.random_model import import_family

if TYPE_CHECKING:
    from miles_embedded.trainer.trainer import EmbeddedTrainer

NAMES = ("adamw", "muon", "adamw8bit", "adamw-offload")
#: Sides of the part ``step``.
SIDES = (*tuple(side for name in NAMES for side in (name, f"{name} offloaded")), "adamw recomputed", "adamw fp16")
#: Learning rate of the part ``learning`` (Muon's default update is as large as AdamW's), and steps whose rewards are averaged.
RATE, AVERAGED = 1e-3, 5
#: Most steps that find the loss scale.
SKIPS = 20


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", choices=["tiny", "dense", "moe", "8b"], default="tiny")
    parser.add_argument("--parts", nargs="+", choices=["step", "learning"], default=["step", "learning"])
    parser.add_argument("--optimizers", nargs="+", choices=NAMES, default=list(NAMES), help="of the part learning")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="of the part step")
    parser.add_argument("--turns", type=int, default=5, help="measured steps (default: 5)")
    parser.add_argument(
        "--groups",
        type=int,
        default=0,
        help="prompts with 8 samples of 320 tokens in a step; 0: 12 short samples (default)",
    )
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of a micro-batch (default: 4096)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the part learning (default: 3)")
    parser.add_argument("--steps", type=int, default=60, help="steps of the part learning (default: 60)")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    given = parser.parse_args()
    result: dict[str, Any] = {"model": given.model}

    def save(quiet: bool) -> None:
        versions = ["miles-core", "miles-plugin-optimizers", "torch", "transformers"]
        used = [
            *(given.sides if "step" in given.parts else ()),
            *(given.optimizers if "learning" in given.parts else ()),
        ]
        versions += ["torchao"] if any(name.startswith("adamw8bit") for name in used) else []
        finish("optimizers", result, given.save, lambda: installed(*versions), given.variant, quiet)

    with tempfile.TemporaryDirectory() as directory:
        if "step" in given.parts:
            result["step"] = {}
            for side, found in every_step(given, Path(directory)):
                result["step"][side] = found
                print(f"{side:<24}", found, file=sys.stderr, flush=True)
                save(quiet=True)
        if "learning" in given.parts:
            result["learning"] = curves(given)
    save(quiet=False)


def every_step(given: argparse.Namespace, directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure each side in a process of its own."""
    from benchmarks.engine.checkpoints import make_model

    clock = Clock()
    import_family("qwen3_moe" if given.model == "moe" else "qwen3")
    clock.note("imports")
    made = in_fork(lambda: str(make_model(given.model, directory)))
    if isinstance(made, dict):
        raise SystemExit("no model was made; see above")
    clock.note("checkpoint")
    for side in given.sides:
        found = in_fork(partial(measure, given, side, directory))
        clock.note(side)
        yield side, found


def bytes_of(optimizer: Any) -> dict[str, float]:
    """The number of weights of a trainer's optimizer, and its bytes per weight."""
    between = sum(t.untyped_storage().nbytes() for t in optimizer.memory())
    with optimizer.on_device():
        device = sum(t.nbytes for t in optimizer.memory())
        every = sum(t.nbytes for t in optimizer.tensors().values())
    weights = sum(m.numel() for m in optimizer.masters.values())
    return {
        "weights": weights,
        "bytes_per_weight_during_a_step": round(device / weights, 3),
        "bytes_per_weight_between_steps": round(between / weights, 3),
        "bytes_per_weight_in_a_checkpoint": round(every / weights, 3),
    }


def build_trainer(given: argparse.Namespace, side: str, checkpoint: Path, seconds: list[float]) -> EmbeddedTrainer:
    """Load the model and create its trainer as ``side`` says; ``seconds`` receives the time of each optimizer step."""
    import torch

    from miles_core.trainer import Callbacks, OptimizerConfig
    from miles_embedded import load_model
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
    from miles_testing.yardstick import weighted

    name, _, more = side.partition(" ")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(checkpoint, "float16" if more == "fp16" else "bfloat16", device)
    config = OptimizerConfig(lr=1e-6)
    settings = TrainerConfig(
        config,
        micro_batch_size=None,
        max_tokens=given.max_tokens,
        offload_optimizer=more == "offloaded",
        recompute=more == "recomputed",
    )
    trainer = EmbeddedTrainer(model, settings, optimizer=lambda groups: make(name, model, groups, config))

    def optimizer_step() -> dict[str, float]:
        with timed(seconds):
            return trainer.optimizer_step()

    trainer.bind(Callbacks(trainer.forward, weighted, optimizer_step))
    return trainer


def measure(given: argparse.Namespace, side: str, checkpoint: Path) -> dict[str, Any]:
    """Whole steps of one optimizer in this process."""
    import torch

    from benchmarks.training.embedded_training import make_batch
    from miles_testing.yardstick import make_batch as small_batch

    torch.set_num_threads(given.threads)
    on_gpu = torch.cuda.is_available()
    seconds: list[float] = []
    trainer = build_trainer(given, side, checkpoint, seconds)
    batch = make_batch(given.groups) if given.groups else small_batch()
    wholes: list[float] = []
    skipped = 0
    while len(wholes) < given.turns + 2:
        if on_gpu and len(wholes) == 2:
            torch.cuda.reset_peak_memory_stats()
        with timed(wholes):
            metrics = trainer.step(batch)
        if metrics.get("train/skipped_steps", (0.0, 1.0))[0]:  # the loss scale of FP16 is still too large
            wholes.pop(), seconds.pop()
            skipped += 1
            if skipped > SKIPS:
                raise SystemExit(f"{side}: {skipped} steps overflowed")
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    return {
        **bytes_of(trainer.optimizer),
        "optimizer_seconds": round(statistics.median(seconds[2:]), 4),
        "first_optimizer_seconds": round(seconds[0], 4),
        "step_seconds": round(statistics.median(wholes[2:]), 4),
        **({"loss_scale": metrics["train/loss_scale"][0], "skipped_steps": skipped} if side.endswith(" fp16") else {}),
        **({} if peak is None else {"peak_gb": round(peak / 1e9, 2), "gpu": torch.cuda.get_device_name()}),
    }


class timed:
    """Append the seconds of the block to ``seconds``, with the device's work completed."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self._wait()
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds.append(time.perf_counter() - self.start)

    def _wait(self) -> None:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def make(name: str, model: Any, groups: list[dict[str, Any]], config: Any) -> Any:
    """Make an optimizer as its provider does in a run."""
    from miles_core.train.adamw import adamw

    if name == "muon":
        from miles_optimizers.config import OptimizersConfig
        from miles_optimizers.muon import MuonAdamW, find_embeddings

        plain = find_embeddings(model)
        return MuonAdamW(groups, lambda rest: adamw(rest, config), config.lr, OptimizersConfig(), plain)
    if name == "adamw8bit":
        from miles_optimizers.adamw8bit import EightBitAdamW

        return EightBitAdamW(groups, lambda rest: adamw(rest, config), config)
    if name == "adamw-offload":
        from miles_optimizers.host import HostAdamW

        return HostAdamW(groups, config)
    return adamw(groups, config)


def curves(given: argparse.Namespace) -> dict[str, Any]:
    """Rewards of toy runs per optimizer and seed, and of FP16 training with AdamW."""
    import torch

    from miles_testing import toy_run

    torch.set_num_threads(given.threads)
    modes: dict[str, dict[str, Any]] = {name: {"optimizer": name, "dtype": "bfloat16"} for name in given.optimizers}
    modes["adamw offloaded"] = {"optimizer": "adamw", "dtype": "bfloat16", "offload_optimizer": True}
    modes["adamw fp16"] = {"dtype": "float16"}
    found: dict[str, Any] = {}
    for mode, given_options in modes.items():
        runs = []
        for seed in range(given.seeds):
            done = toy_run(
                steps=given.steps, seed=seed, lr=RATE, rollout_batch_size=4, n_samples_per_prompt=8, **given_options
            )
            rewards = [m["reward/mean"] for m in done.metrics]
            runs.append([round(statistics.mean(part), 4) for part in (rewards[:AVERAGED], rewards[-AVERAGED:])])
        found[mode] = {"first_and_last_reward": runs, "mean_last": round(statistics.mean(last for _, last in runs), 4)}
        print(f"{mode:<16}", found[mode], file=sys.stderr, flush=True)
    return {"lr": RATE, "steps": given.steps, **found}


if __name__ == "__main__":
    main()
