"""Where the time of a training step and of a weight sync goes on one GPU: kernels, host, and the GPU waiting for the host.

The batch and the models are those of ``embedded_training.py``. The parts, each of which writes its result when it is complete:

- ``alone``: steps of the trainer, its kernels, the host's seconds per phase, the GPU's idle seconds per phase, synchronisations, and
  allocations of device memory;
- ``host``: the same with narrow layers, whose arithmetic takes no time, so the time of a step is that of the host;
- ``compiled``: with decoder layers compiled by ``torch.compile`` around the attention (a prototype, dense models only);
- ``graphs``: forward and backward pass of one micro-batch, launched kernel by kernel and as a CUDA graph;
- ``loop``: training and sync inside ``miles train``, one process per set of flags, with the same tables.

``--tiny`` runs all parts with two narrow layers, also on a CPU. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.checkpoints import EXPERTS, SIZES, VOCABULARY, save_random
from benchmarks.engine.embedded_rollout import Result
from benchmarks.measure import ROOT, finish, installed, options
from benchmarks.training import embedded_training, gpu_profile
from benchmarks.training.embedded_training import PEAK, make_batch, operations, timed
from miles_core.trainer import Callbacks
from miles_embedded.model.load import load_model
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.yardstick import weighted

PARTS = ("alone", "host", "compiled", "graphs", "loop")
#: Sets of flags of ``miles train``, by name: model, flags.
RUNS = {
    "dense": ("dense", "--plugins tis"),
    "dense-fp8": ("dense", "--plugins tis,fp8 --train-precision fp8 --rollout-precision fp8"),
    "dense-lora": ("dense", "--plugins tis,lora --lora-rank 16"),
    "dense-exact": ("dense", "--plugins true_on_policy"),
    "moe": ("moe", "--plugins tis"),
    "moe-fp8": ("moe", "--plugins tis,fp8,r3 --train-precision fp8 --rollout-precision fp8"),
    "moe-exact": ("moe", "--plugins true_on_policy"),
}
#: Widths of layers whose arithmetic takes no time.
NARROW = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", choices=["dense", "moe"], default=["dense", "moe"])
    parser.add_argument("--runs", nargs="+", default=list(RUNS), help=f"runs of the part loop: {', '.join(RUNS)}")
    parser.add_argument("--max-tokens", type=int, default=32768, help="computed tokens of a micro-batch")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--turns", type=int, default=3, help="measured steps")
    parser.add_argument(
        "--steps", type=int, default=8, help="steps of a run of the part loop; the last two are profiled"
    )
    parser.add_argument("--tiny", action="store_true", help="two narrow layers, short responses")
    parser.add_argument("--out", type=Path, help="write results here after every part")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--run", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.tiny:
        given.groups, embedded_training.RESPONSE = 2, 16
    if given.run:
        run_in_loop(given)
        return
    result = Result(given.out)
    result.put("device", torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    if {*given.parts} - {"loop"}:
        for kind in given.models:
            measure_model(given, kind, result)
    for name in given.runs if "loop" in given.parts else ():
        put(result, f"loop_{name}", lambda name=name: start_run(given, name))
    finish("train_host", result.found, given.save, lambda: installed("torch", "transformers"), given.variant)


def put(result: Result, name: str, compute: Callable[[], Any]) -> None:
    """Add a part's result, or its error: the other parts run all the same."""
    try:
        result.put(name, compute())
    except Exception as error:  # a part that fails must not end the others
        traceback.print_exc()
        result.put(name, {"error": f"{type(error).__name__}: {error}"[:300]})
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_checkpoint(kind: str, directory: Path, narrow: bool, layers: int | None = None) -> Path:
    """A random model of ``checkpoints.SIZES``; ``narrow``: with layers of ``NARROW``."""
    import transformers

    sizes = {**SIZES[kind], **(NARROW if narrow else {})}
    common = {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 1}
    common |= {"head_dim": 128, "tie_word_embeddings": False, "dtype": "bfloat16", **sizes, "pad_token_id": 0}
    if narrow:
        common["vocab_size"] = 512
    if layers:
        common["num_hidden_layers"] = layers
    if kind == "dense":
        return save_random(transformers.Qwen3Config(**common), directory)
    experts = {**EXPERTS, **({"moe_intermediate_size": 64} if narrow else {})}
    return save_random(transformers.Qwen3MoeConfig(**common, **experts), directory)


def measure_model(given: argparse.Namespace, kind: str, result: Result) -> None:
    """All parts but ``loop`` with one model."""
    layers = 2 if given.tiny else None
    with tempfile.TemporaryDirectory() as directory:
        wide, narrow = Path(directory, "wide"), Path(directory, "narrow")
        make_checkpoint(kind, wide, given.tiny, layers)
        make_checkpoint(kind, narrow, True, layers)
        if "alone" in given.parts:
            put(result, f"alone_{kind}", lambda: measure_steps(given, wide))
        if "host" in given.parts:
            put(result, f"host_{kind}", lambda: measure_steps(given, narrow))
        if kind == "dense" and "compiled" in given.parts:
            put(result, "compiled_dense", lambda: measure_steps(given, wide, compile_layers))
            put(result, "compiled_host_dense", lambda: measure_steps(given, narrow, compile_layers))
        if kind == "dense" and "graphs" in given.parts:
            put(result, "graph_dense", lambda: measure_graph(given, wide))
            put(result, "graph_host_dense", lambda: measure_graph(given, narrow))


def make_trainer(given: argparse.Namespace, checkpoint: Path) -> EmbeddedTrainer:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(checkpoint, "bfloat16" if device == "cuda" else "float32", device)
    trainer = EmbeddedTrainer(model, TrainerConfig(micro_batch_size=None, max_tokens=given.max_tokens))
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer


def measure_steps(
    given: argparse.Namespace, checkpoint: Path, change: Callable[[EmbeddedTrainer], None] | None = None
) -> dict[str, Any]:
    """Seconds of a step, and its tables."""
    trainer = make_trainer(given, checkpoint)
    if change is not None:
        change(trainer)
    batch = make_batch(given.groups)
    seconds = [timed(trainer, batch) for _ in range(given.turns + 2)]
    took = statistics.median(seconds[2:])
    rate = operations(trainer.model, given.groups) / took
    found: dict[str, Any] = {"seconds": round(took, 4), "all": [round(s, 4) for s in seconds]}
    if torch.cuda.is_available():
        found["share_of_bf16_peak"] = round(rate / PEAK.get(torch.cuda.get_device_capability(), 989e12), 3)
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    micro_batches = len(trainer.split(batch))
    found["micro_batches"] = micro_batches
    with watched(trainer):
        for name, waits in (("phases_host", False), ("phases_with_gpu", True)):
            with gpu_profile.Phases(waits) as phases:
                timed(trainer, batch)
            found[name] = phases.milliseconds()
        found["synchronisations"] = gpu_profile.synchronizations(lambda: trainer.step(batch, lr=1e-6))
        found["profile"] = gpu_profile.profile(lambda: timed(trainer, batch), micro_batches)
    return found


@contextmanager
def watched(trainer: EmbeddedTrainer) -> Iterator[None]:
    """Report the phases of the trainer's steps to ``gpu_profile.Phases``."""
    own, prepare, backward = trainer.callbacks, trainer.prepare, Tensor.backward
    watch = gpu_profile.watch
    trainer.callbacks = Callbacks(
        watch("forward", own.forward), watch("loss", own.loss), watch("optimizer", own.optimizer_step)
    )
    trainer.prepare = watch("prepare", prepare)  # type: ignore[method-assign]
    Tensor.backward = watch("backward", backward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        trainer.callbacks = own
        trainer.prepare = prepare  # type: ignore[method-assign]
        Tensor.backward = backward  # type: ignore[method-assign]


# -- prototypes ---------------------------------------------------------------------------------------------------------


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


def _before(x, weight, q, k, v, q_norm, k_norm, cosine, sine, eps: float, dim: int):  # type: ignore[no-untyped-def]
    normed, rows = _norm(x, weight, eps), x.shape[1]
    linear = torch.nn.functional.linear
    query, key, value = (linear(normed, w).view(1, rows, -1, dim) for w in (q, k, v))
    query, key = _norm(query, q_norm, eps), _norm(key, k_norm, eps)
    cosine, sine = cosine.unsqueeze(2), sine.unsqueeze(2)
    return _rotate(query, cosine, sine), _rotate(key, cosine, sine), value


def _after(x, attended, o, weight, gate, up, down, eps: float):  # type: ignore[no-untyped-def]
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    x = x + linear(attended, o)
    normed = _norm(x, weight, eps)
    return x + linear(silu(linear(normed, gate)) * linear(normed, up), down)


def compile_layers(trainer: EmbeddedTrainer) -> None:
    """Replace the forward of dense Qwen3 layers by two compiled functions around the attention."""
    torch._dynamo.config.cache_size_limit = 64
    before, after = torch.compile(_before, dynamic=True), torch.compile(_after, dynamic=True)
    for layer in trainer.model.model.layers:
        layer.__dict__["forward"] = _compiled_forward(layer, before, after)


def _compiled_forward(layer: Any, before: Callable[..., Any], after: Callable[..., Any]) -> Callable[..., Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    eps = float(first.variance_epsilon)

    def forward(hidden_states: Tensor, position_embeddings: Any, call: Any, **_: Any) -> Tensor:
        a = attention
        weights = a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, a.q_norm.weight, a.k_norm.weight
        q, k, v = before(hidden_states, first.weight, *weights, *position_embeddings, eps, a.head_dim)
        out = call.attend(a, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), a.scaling)
        weights = a.o_proj.weight, second.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight
        result: Tensor = after(hidden_states, out.reshape(1, out.shape[1], -1), *weights, eps)
        return result

    return forward


def measure_graph(given: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    """Milliseconds of forward and backward pass of the first micro-batch: eager, and as a CUDA graph."""
    from functools import partial

    from miles_embedded.model import logprobs
    from miles_embedded.trainer import trainer as module

    trainer, batch = make_trainer(given, checkpoint), make_batch(given.groups)
    _, micro_batch, ctx = next(trainer.micro_batches(batch, "train", False))
    call = module.PackedCall(ctx, ctx.attached["packing"])
    before = module.PackedCall, logprobs.checkpoint
    # one call, whose plan is made before the capture; random states cannot be read during it
    module.PackedCall = lambda *_: call  # type: ignore[misc,assignment]
    logprobs.checkpoint = partial(before[1], preserve_rng_state=False)

    def compute() -> None:
        output = trainer.callbacks.forward(trainer.model, micro_batch, ctx)
        weighted(output, micro_batch, ctx).value.backward()

    try:
        found = {"eager_ms": gpu_profile.milliseconds(compute, 5)}
        if torch.cuda.is_available():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    compute()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                compute()
            found["graph_ms"] = gpu_profile.milliseconds(graph.replay, 5)
        return found
    finally:
        module.PackedCall, logprobs.checkpoint = before  # type: ignore[misc]


# -- the loop -----------------------------------------------------------------------------------------------------------


def start_run(given: argparse.Namespace, name: str) -> Any:
    """Run one set of flags in its own process."""
    command = [sys.executable, __file__, "--run", name, "--steps", str(given.steps), "--groups", str(given.groups)]
    command += ["--max-tokens", str(given.max_tokens), *(["--tiny"] if given.tiny else [])]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}: {done.stdout[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_in_loop(given: argparse.Namespace) -> None:
    """``miles train``, with tables of its last two steps; prints one JSON object."""
    from benchmarks.training.workload import random_words
    from miles_core import loop
    from miles_core.cli import train
    from miles_core.observe.metrics import read
    from miles_core.train.rank import Rank

    kind, flags = RUNS[given.run]
    found: dict[str, Any] = {}
    state = SimpleNamespace(step=0)
    original, learn, sync = loop.step, Rank.learn, loop.sync

    def observed_learn(rank: Rank, *args: Any) -> Any:
        before = gpu_profile.memory_calls()
        with watched(rank.trainer):  # type: ignore[arg-type]
            if state.step == given.steps - 2:
                return gpu_profile.into(found, "learn_profile", lambda: learn(rank, *args))
            with gpu_profile.Phases(False) as phases:
                out = learn(rank, *args)
        found["phases_host"], found["memory_calls"] = phases.milliseconds(), gpu_profile.memory_calls(before)
        return out

    async def observed_sync(*args: Any) -> Any:
        with gpu_profile.observed(found, "sync", state.step - given.steps + 2):
            return await sync(*args)

    async def observed_step(run: Any, *parts: Any) -> None:
        await original(run, *parts)
        record = read(run.directory / "metrics.jsonl")[-1]
        for key in (k for k in record if k.startswith(("time/", "sync/"))):
            found.setdefault("steps", {}).setdefault(key, []).append(round(record[key], 4))
        state.step += 1

    loop.step, loop.sync, Rank.learn = observed_step, observed_sync, observed_learn  # type: ignore[assignment,method-assign]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as directory:
        work = random_words(Path(directory), "tiny" if given.tiny else kind)
        samples, tokens = (2, 8) if given.tiny else (8, 256)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        flags += " --emulate-precision" if "fp8" in flags and device == "cpu" else ""
        every = f"""--hf-checkpoint {work.checkpoint} --prompt-data {work.prompt_file} --input-key prompt --label-key label
            --custom-rm-path {Path(__file__).with_name("workload.py")}:rm_odd --save {directory}/run --device {device}
            --dtype {"bfloat16" if device == "cuda" else "float32"}
            --rollout-batch-size {given.groups} --n-samples-per-prompt {samples} --num-rollout {given.steps}
            --rollout-max-response-len {tokens} --max-running-requests {given.groups * samples} --lr 1e-6
            --use-dynamic-batch-size --max-tokens-per-gpu {given.max_tokens} --seed 0 --log-level warning {flags}"""
        code = train.run(every.split())
    out.write(json.dumps({"flags": flags, **found}) + "\n")
    out.flush()
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
