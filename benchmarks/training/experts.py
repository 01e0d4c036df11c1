"""Memory and time of a training step with experts in host memory (`--offload-experts`), and equality of the results.

    python benchmarks/training/experts.py                                        # CPU: a tiny model, equality
    python benchmarks/training/experts.py --device cuda --hidden 2048 --layers 6 --experts 16 --inner 1024 --tokens 4096   # one GPU, a minute

Every mode runs in a process of its own, forked from one that has imported the packages: some optimizer steps of one trainer on random
samples, each of several micro-batches. The weights after the last step are compared by a digest. The result has the seconds of each mode's
phases: ``load``, ``offload`` (copies of the experts to pinned host memory), ``trainer`` (master weights), ``first step`` (which allocates gradients
and moments), ``steps`` and ``digest``.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measure import finish, installed, options
from benchmarks.training.forked import Clock, in_fork
from benchmarks.training.random_model import import_family, make_checkpoint

if TYPE_CHECKING:
    import torch

    from miles_core.data import Batch
    from miles_embedded.trainer.trainer import EmbeddedTrainer

#: Mode -> (offload, recompute activations).
MODES = {
    "on the device": (False, False),
    "offloaded": (True, False),
    "on the device, recomputed": (False, True),
    "offloaded, recomputed": (True, True),
}
#: A mode that is measured twice (``--repeat``): without deterministic algorithms a GPU adds in another order each time.
REPEATED = {"on the device, again": MODES["on the device"]}


def make_batch(given: argparse.Namespace) -> Batch:
    """One sample per micro-batch, of random tokens."""
    import torch

    from miles_core.data import Sample, collate

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 60, (given.tokens,), generator=generator).tolist() for _ in range(given.micro_batches)]
    return collate([Sample(tokens=row, response_length=given.tokens - 1, index=n) for n, row in enumerate(rows)])


def digest_of(model: torch.nn.Module) -> str:
    """The first 16 digits of the SHA-256 of all weights."""
    import torch

    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def build_trainer(given: argparse.Namespace, mode: str, checkpoint: Path, clock: Clock) -> EmbeddedTrainer:
    """Load the model and create its trainer as ``mode`` says; ``clock`` notes the phases."""
    from miles_core.trainer import Callbacks, Context, Loss, OptimizerConfig, Output
    from miles_embedded import load_model
    from miles_embedded.trainer.deterministic import DeterministicTrainer
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
    from miles_experts.offload import offload_experts

    offload, recompute = (MODES | REPEATED)[mode]
    model = load_model(checkpoint, given.dtype, given.device)
    for parameter in model.parameters():  # products on a CPU round by the alignment of their operands
        parameter.data = parameter.data.clone()
    clock.note("load")
    if offload:
        offload_experts(model)
        clock.note("offload")
    config = TrainerConfig(OptimizerConfig(lr=1e-4, clip_grad=1.0), micro_batch_size=1, recompute=recompute)
    trainer = (DeterministicTrainer if given.deterministic else EmbeddedTrainer)(model, config)

    def loss(output: Output, micro_batch: Batch, ctx: Context) -> Loss:
        assert output.log_probs is not None
        return Loss(-output.log_probs.sum() / given.tokens)

    trainer.bind(Callbacks(trainer.forward, loss, trainer.optimizer_step))
    clock.note("trainer")
    return trainer


def measure(given: argparse.Namespace, mode: str, checkpoint: Path) -> dict[str, Any]:
    """Train some steps in this process."""
    import torch

    torch.set_num_threads(given.threads)
    cuda, clock = given.device == "cuda", Clock()
    trainer = build_trainer(given, mode, checkpoint, clock)
    batch = make_batch(given)
    seconds, norms = [], []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for number in range(given.steps + 1):
        if number == 1:
            clock.note("first step")
        start = time.perf_counter()
        norms.append(trainer.step(batch)["train/grad_norm"][0])
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    clock.note("steps")
    digest = digest_of(trainer.model)
    clock.note("digest")
    found = {
        "seconds": float(f"{statistics.median(seconds[1:]):.4g}"),
        "norms": norms,
        "digest": digest,
        "phases": clock.phases,
    }
    if cuda:
        found |= {
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3),
            "between_steps_gb": round(torch.cuda.memory_allocated() / 1e9, 3),
            "gpu": torch.cuda.get_device_name(),
        }
    return found


def compare(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run every mode; ``keep`` receives the result after each of them."""
    sizes = {
        "hidden_size": given.hidden,
        "num_hidden_layers": given.layers,
        "num_attention_heads": max(given.hidden // 64, 1),
        "num_key_value_heads": max(given.hidden // 256, 1),
        "head_dim": 64,
        "num_experts": given.experts,
        "num_experts_per_tok": given.top_k,
        "moe_intermediate_size": given.inner,
        "max_position_embeddings": max(given.tokens, 128),
    }
    found: dict[str, Any] = {}
    clock = Clock()
    import_family("qwen3_moe")
    clock.note("imports")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory, "model")
        make_checkpoint("qwen3_moe", checkpoint, sizes, given.device)
        clock.note("checkpoint")
        for mode in MODES | (REPEATED if given.repeat else {}):
            # without offloading, a model may not fit into the GPU's memory: that is a result, too
            found[mode] = in_fork(partial(measure, given, mode, checkpoint))
            clock.note(mode)
            offload, recompute = (MODES | REPEATED)[mode]
            here = found[next(m for m in MODES if MODES[m] == (False, recompute))]
            if (offload or mode in REPEATED) and "digest" in here and "digest" in found[mode]:
                same = (here["digest"], here["norms"]) == (found[mode]["digest"], found[mode]["norms"])
                found[mode]["bit_equal"] = same
            print(f"{mode:<28}", found[mode], file=sys.stderr, flush=True)
            expert_parameters = 3 * given.hidden * given.inner * given.experts * given.layers
            keep({"sizes": sizes, "expert_parameters": expert_parameters, "modes": found})


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the model")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--layers", type=int, default=4, help="layers, all with experts")
    parser.add_argument("--experts", type=int, default=8, help="experts per layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token")
    parser.add_argument("--inner", type=int, default=64, help="inner size of an expert")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after one more")
    parser.add_argument("--deterministic", action="store_true", help="train as with --embedded-deterministic")
    parser.add_argument("--repeat", action="store_true", help="measure one mode twice, and compare its bits")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    given = parser.parse_args()
    versions = ("miles-core", "miles-plugin-experts", "torch", "transformers")
    result: dict[str, Any] = {}

    def keep(found: dict[str, Any], quiet: bool = True) -> None:
        result.update(found)
        finish(Path(__file__).stem, result, given.save, lambda: installed(*versions), given.variant, quiet)

    compare(given, keep)
    keep({}, quiet=False)


if __name__ == "__main__":
    main()
