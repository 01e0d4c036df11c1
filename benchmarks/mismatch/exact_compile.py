"""``torch.compile`` of the forward that ``true_on_policy`` makes invariant: does it capture, does it keep the bits, does it pay?

Pieces: the steps of a layer that are no products and no attention, each as PyTorch code, compiled as one graph with several settings of the
compiler. For each: seconds of the first call, whether a row's bits are those of the eager invariant step (on a GPU the plugin's kernel, where it
has one), whether they depend on the number of rows, and microseconds of one row and of many, eager and compiled.

As it is: the decoder layers of a model with the plugin, compiled without a backend; graphs, and the reasons for which they end.

Model: the layers of a Qwen3 model as one function (``exact_compile_layer.py``), whose products and attention are opaque; its norms, rotations and
gates are opaque as well, or fused by the compiler. For each setting: the gap between engine and trainer that both compute so, the largest
difference from the eager model, and seconds of training steps and rollouts, eager and compiled, in turns.

On a CPU everything runs with a tiny model, as a rehearsal. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.functional import embedding

from benchmarks.measure import finish, installed, medians, options
from benchmarks.mismatch.exact_compile_layer import (
    compute_layer,
    gate_eagerly,
    native_gate,
    native_norm,
    native_rotation,
    norm_eagerly,
    rotate_eagerly,
    use_layer,
)
from benchmarks.mismatch.true_on_policy import SPLITS, generate
from benchmarks.mismatch.true_on_policy_profile import loss, make_samples, measure_turn, seconds_of, steps_of, wait
from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import collate
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded import decoder_layers
from miles_embedded.model.load import load_model
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_true_on_policy.hooks import make_invariant
from miles_true_on_policy.log_probs import log_softmax
from miles_true_on_policy.mode import Invariant

#: Numbers of rows; the last is the largest.
ROWS = (1, 2, 7, 16, 64, 256, 1000, 4096)
EPS = 1e-6
#: Round where the eager code rounds, divide no reduction among programs, and choose no variant by its time.
STRICT = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "split_reductions": False,
    "triton.cooperative_reductions": False,
    "triton.mix_order_reduction": False,
    "deterministic": True,
}
#: Name -> arguments of ``torch.compile``.
SETTINGS: dict[str, dict[str, Any]] = {
    "inductor": {"options": {}},
    "inductor, strict": {"options": STRICT},
    "inductor, casts": {"options": {"emulate_precision_casts": True}},
    "aot_eager": {"backend": "aot_eager"},
    "cudagraphs": {"backend": "cudagraphs"},
}
#: Setting, and whether norms, rotations and gates are PyTorch code, in the order in which they are measured.
VARIANTS = (("inductor, strict", True), ("inductor", False), ("inductor", True), ("aot_eager", False))


#: The end of a part.
DONE = object()


@dataclass
class Before:
    """The eager model: a batch, its log-probabilities before any step, and what trains and samples with the model."""

    batch: Any
    scores: list[np.ndarray]
    steps: dict[str, Callable[[], Any]]


@dataclass
class Piece:
    """A step of a layer.

    Attributes:
        function: what is compiled.
        eager: the invariant step.
        inputs: of the largest number of rows.
        dims: of each input, the dimension of its rows; None for a weight.
    """

    function: Callable[..., Any]
    eager: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    dims: tuple[int | None, ...]

    def first(self, rows: int) -> tuple[Tensor, ...]:
        """The inputs of the first rows. Their number is a variable of the compiled graph, all other sizes are constants."""
        found = []
        for x, dim in zip(self.inputs, self.dims, strict=True):
            part = x if dim is None else x.narrow(dim, 0, min(rows, x.shape[dim]))
            if dim is not None and rows > 1:
                torch._dynamo.maybe_mark_dynamic(part, dim)
            found.append(part)
        return tuple(found)


def compiled(function: Callable[..., Any], setting: str) -> Callable[..., Any]:
    """``function`` by ``torch.compile``; a graph that ends is an error."""
    torch._dynamo.reset()
    fixed: dict[str, Any] = {"dynamic": False} if setting == "cudagraphs" else {}
    found: Callable[..., Any] = torch.compile(function, fullgraph=True, **fixed, **SETTINGS[setting])
    return found


def add_and_normalize(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A residual addition and the norm after it."""
    total = x + other
    return total, native_norm(total, weight, EPS)


def add_and_normalize_eagerly(x: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """With the invariant norm."""
    total = x + other
    return total, norm_eagerly(total, weight, EPS)


def route(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The router of Qwen3-MoE with the plugin's choice: weights and experts of each row."""
    values, index = logits.softmax(-1, dtype=torch.float32).sort(dim=-1, descending=True, stable=True)
    values, index = values[:, :4], index[:, :4]
    return (values / values.sum(-1, keepdim=True)).to(logits.dtype), index


def route_eagerly(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The same inside the plugin's mode."""
    with Invariant():
        return route(logits)


def to_log_probs(logits: Tensor) -> Tensor:
    """Logits in BF16 to log-probabilities."""
    return (logits.float() / 0.7).log_softmax(-1)


def make_pieces(device: str, width: int, vocabulary: int) -> dict[str, Piece]:
    """The steps by name."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    most = ROWS[-1]
    x, other, weight, table = random(most, width), random(most, width), random(width), random(vocabulary, width)
    heads, angle = random(1, most, width // 64, 64).transpose(1, 2), random(1, most, 64)
    logits, experts = random(most // 4, vocabulary), random(most, 32)
    ids = torch.randint(vocabulary, (most,), generator=generator).to(device)
    temperature = torch.full((), 0.7, device=device)
    return {
        "residual addition": Piece(torch.add, torch.add, (x, other), (0, 0)),
        "addition and norm": Piece(add_and_normalize, add_and_normalize_eagerly, (x, other, weight), (0, 0, None)),
        "gate": Piece(native_gate, gate_eagerly, (x, other), (0, 0)),
        "rotation": Piece(native_rotation, rotate_eagerly, (heads, angle, angle.clone()), (2, 1, 1)),
        "embedding": Piece(embedding, embedding, (ids, table), (0, None)),
        "router": Piece(route, route_eagerly, (experts,), (0,)),
        "cast, temperature, log-softmax": Piece(
            to_log_probs, lambda logits: log_softmax(logits.float() / temperature), (logits,), (0,)
        ),
    }


def outputs(found: Any) -> tuple[Tensor, ...]:
    """The results as a tuple; copies, since a graph's are overwritten."""
    return tuple(x.clone() for x in (found if isinstance(found, tuple) else (found,)))


def are_equal(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], rows_at: int) -> bool:
    """Whether the first rows of ``theirs`` are ``ours``, bit for bit."""
    return all(torch.equal(a, b.narrow(rows_at, 0, a.shape[rows_at])) for a, b in zip(ours, theirs, strict=True))


def microseconds(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> float:
    """Median time of a call among others that follow one another."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(20):
            function(*inputs)
        wait()
        times.append((time.perf_counter() - started) / 20)
    return round(statistics.median(times) * 1e6, 1)


@torch.no_grad()
def measure_piece(piece: Piece, setting: str) -> dict[str, Any]:
    """Compile one piece with one setting; the error's first line where that fails."""
    run, rows_at = compiled(piece.function, setting), piece.dims[0] or 0
    rows = (1, 256, ROWS[-1]) if setting == "cudagraphs" else ROWS
    started = time.perf_counter()
    try:
        whole = outputs(run(*piece.first(rows[-1])))
    except Exception as error:  # of any stage of the compiler
        return {"captured": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"}
    wait()
    found: dict[str, Any] = {"captured": True, "compile_seconds": round(time.perf_counter() - started, 2)}
    expected = outputs(piece.eager(*piece.first(rows[-1])))
    parts = {n: outputs(run(*piece.first(n))) for n in rows}
    found["rows_that_differ_from_eager"] = [n for n, part in parts.items() if not are_equal(part, expected, rows_at)]
    found["rows_that_depend_on_their_number"] = [n for n, part in parts.items() if not are_equal(part, whole, rows_at)]
    found["microseconds"] = {
        str(n): [microseconds(f, piece.first(n)) for f in (piece.eager, run)] for n in (rows[0], rows[-1])
    }
    return found


def load(checkpoint: Path, device: str) -> Any:
    """A model with the plugin."""
    model = load_model(checkpoint, "bfloat16", device)
    make_invariant(model)
    return model


@contextmanager
def graphs_counted(found: dict[str, Any]) -> Iterator[None]:
    """Count the graphs that the compiler makes within this block, and collect the reasons why they end."""
    torch._dynamo.reset()
    counters.clear()
    yield
    reasons = sorted(counters["graph_break"].items(), key=lambda item: -item[1])
    found |= {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(count for _, count in reasons),
        "reasons": [f"{count}: {reason.splitlines()[0][:120]}" for reason, count in reasons[:6]],
    }


def compile_as_it_is(checkpoint: Path, device: str, batch: Any) -> dict[str, Any]:
    """The first two layers of a model with the plugin, without changes: one scoring pass."""
    model, found = load(checkpoint, device), dict[str, Any](layers=0)
    for layer in decoder_layers(model)[:2]:
        layer.__dict__["forward"] = torch.compile(layer.forward, backend="eager", dynamic=True)
        found["layers"] += 1
    started = time.perf_counter()
    with graphs_counted(found):
        try:
            score(model, batch, SPLITS[:1])
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    torch._dynamo.reset()
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def score(model: Any, batch: Any, splits: Any = SPLITS) -> list[np.ndarray]:
    """Log-probabilities of a batch's tokens by a trainer that does not train, for each division into micro-batches."""
    trainer, found = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig(), trains=False)), []
    trainer.bind(Callbacks(trainer.forward, loss, trainer.optimizer_step))
    for count, share in splits:
        trainer.config = replace(trainer.config, micro_batch_size=count, share_prompts=share)
        found.append(trainer.log_probs(batch, "old")["log_probs"].cpu()[batch.mask.bool()].numpy())
    model.requires_grad_(True)
    return found


def largest(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    """The largest difference."""
    return max(float(np.abs(a - b).max()) for a, b in zip(left, right, strict=True))


def measure_variant(
    checkpoint: Path, device: str, before: Before, given: argparse.Namespace, found: dict[str, Any]
) -> None:
    """Compile the layers of a model with ``found["setting"]``; adds bits and seconds to ``found`` as they are known."""
    with graphs_counted(found):
        model, run = load(checkpoint, device), compiled(compute_layer, found["setting"])
        use_layer(model, run, found["native"])
        started = time.perf_counter()
        samples = generate(model)
        rollout = np.concatenate([np.asarray(s.rollout_log_probs, np.float32) for s in samples])
        scores = score(model, collate(samples))
        found["compile_seconds"] = round(time.perf_counter() - started, 1)
        found["largest_gap"] = largest(scores, [rollout] * len(scores))
        found["largest_difference_from_eager"] = largest(score(model, before.batch), before.scores)
        say(found)
        both = {"eager": before.steps, "compiled": steps_of(model, given, make_samples(given))}
        for part in ("train", "rollout"):
            found[part] = {"first": {name: round(seconds_of(steps[part]), 2) for name, steps in both.items()}}
            turns: dict[str, list[dict[str, float]]] = {name: [] for name in both}
            for turn in range(given.turns):
                for name in sorted(both, reverse=bool(turn % 2)):
                    turns[name].append(measure_turn(both[name][part]))
            seconds = {name: medians(of)["seconds"] for name, of in turns.items()}
            found[part] |= seconds | {"ratio": round(seconds["compiled"] / seconds["eager"], 3)}
            say(part, found[part])


def try_model(directory: str, device: str, given: argparse.Namespace, result: dict[str, Any]) -> Iterator[None]:
    """Fill ``result`` with what the compiler makes of a model's layers; after each trial the caller may stop."""
    from benchmarks.engine.sglang_engine import SIZES, make_model

    if device != "cuda":
        SIZES["dense"] = {**SIZES["tiny"], "num_attention_heads": 4}
    checkpoint = make_model("dense", Path(directory) / "model")
    eager = load(checkpoint, device)
    batch = collate(generate(eager))
    before = Before(batch, score(eager, batch), steps_of(eager, given, make_samples(given)))
    say("eager model", {part: round(seconds_of(step), 2) for part, step in before.steps.items()})
    result["as_it_is"] = compile_as_it_is(checkpoint, device, batch)
    say("as it is", result["as_it_is"])
    result["model"] = []
    for setting, native in (VARIANTS[i] for i in given.variants):
        found: dict[str, Any] = {"setting": setting, "native": native}
        result["model"].append(found)
        try:
            measure_variant(checkpoint, device, before, given, found)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            traceback.print_exc()
        yield


def try_pieces(device: str, given: argparse.Namespace, result: dict[str, Any]) -> Iterator[None]:
    """Fill ``result`` with piece -> setting -> ``measure_piece``; after each setting the caller may stop."""
    width, vocabulary = (1536, 32000) if device == "cuda" else (128, 1000)
    pieces = make_pieces(device, width, vocabulary)
    result["pieces"] = {name: {} for name in pieces}
    for setting in given.settings:
        if setting == "cudagraphs" and device != "cuda":
            continue
        for name, piece in pieces.items():
            result["pieces"][name][setting] = measure_piece(piece, setting)
            say(name, setting, result["pieces"][name][setting])
        yield


def say(*words: Any) -> None:
    """Print at once."""
    print(*words, file=sys.stderr, flush=True)


def advance(trial: Iterator[None], keep: Callable[[], None]) -> bool:
    """Run the next part of a trial and save what is known, so that a killed process loses one part; False at its end."""
    more = next(trial, DONE) is not DONE
    keep()
    return more


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--parts", nargs="+", choices=("pieces", "model"), default=["model", "pieces"])
    parser.add_argument("--variants", type=int, nargs="+", default=list(range(len(VARIANTS))), help="of VARIANTS")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further trial begins")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=16384)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch._inductor.config.compile_threads = 1  # a pool of processes would import torch again
    torch._dynamo.config.recompile_limit = 64
    device, started = "cuda" if torch.cuda.is_available() else "cpu", time.monotonic()
    result: dict[str, Any] = {"rows": list(ROWS), "micro_batch": given.micro_batch}

    def keep(quiet: bool = True) -> None:
        versions = ("miles-core", "miles-plugin-true-on-policy", "torch", "transformers")
        variant = "gpu" if device == "cuda" else "cpu"
        finish("exact_compile", result, given.save, lambda: installed(*versions), variant, quiet)

    try:
        with tempfile.TemporaryDirectory() as directory:
            parts = {"model": try_model(directory, device, given, result), "pieces": try_pieces(device, given, result)}
            trials = {name: parts[name] for name in given.parts}
            while trials and time.monotonic() - started < given.limit:  # in turns, so that a short run has some of both
                trials = {name: trial for name, trial in trials.items() if advance(trial, keep)}
    finally:
        keep(quiet=False)


if __name__ == "__main__":
    main()
