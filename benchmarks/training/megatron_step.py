"""A training step of the Megatron trainer on a GPU: seconds, share of the GPU's peak, memory against the plan, FP8 against BF16.

Random models of several sizes; a step is forward, backward and AdamW over ``--micro-batches`` micro-batches of packed samples that
fill them. The share of the peak counts 6 operations a parameter and token that is used (of experts the chosen ones; no embedding) and
causal attention, recomputation not. ``planned`` is the memory that ``miles plan`` expects of a rank, without what CUDA takes for itself,
and ``peak`` what torch had allocated. ``--formats``: ``fp8`` computes in blocks of 128 x 128, its backward pass in BF16 with the numbers
that were multiplied, ``fp8_backward`` quantises gradients too. ``--embedded`` adds the embedded trainer on the same batch, ``--replay``
the step with r3 and the routes that the routers choose by themselves, ``--parity`` compares TransformerEngine's codes with the
format's, ``--gradients`` those of ``fp8_backward`` with those of ``fp8``. Several GPUs: ``torchrun --nproc-per-node 2 ... --sizes ep=2``.
The last line is one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.measure import finish, installed, options

#: Dense BF16 operations a second by compute capability.
PEAK = {(9, 0): 989e12, (10, 0): 2250e12, (8, 0): 312e12}
_QWEN = {"model_type": "qwen3", "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "dense_1b": _QWEN
    | {"num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "vocab_size": 32000},
    "dense_5b": _QWEN
    | {"num_hidden_layers": 18, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 151936},
    "moe_2b": _QWEN
    | {"model_type": "qwen3_moe", "num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 6144}
    | {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000, "moe_intermediate_size": 768}
    | {"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True},
}


def make_checkpoint(name: str, directory: Path, weights: bool = False) -> Path:
    """Random BF16 weights under the checkpoint's names, or a ``config.json`` alone; the first rank of a machine writes them."""
    import torch
    from safetensors.torch import save_file

    from miles_megatron import families
    from miles_megatron.shapes import shapes

    target, config = directory / name, MODELS[name]
    done = target / ("model.safetensors" if weights else "config.json")
    if int(os.environ.get("LOCAL_RANK", "0")) == 0 and not done.exists():
        target.mkdir(parents=True, exist_ok=True)
        a, found = families.read(config), {}
        for tensor, shape in (item for entry in families.weights(a) for item in shapes(entry, a).items() if weights):
            made = torch.randn(shape, device="cuda") * 0.6 / shape[-1] ** 0.5 if len(shape) == 2 else torch.ones(shape)
            found[tensor] = made.bfloat16().cpu()
        if weights:
            save_file(found, target / "model.safetensors")
        (target / "config.json").write_text(json.dumps(config))
    while not (done.exists() and (target / "config.json").exists()):
        time.sleep(0.2)
    return target


def fill(weights: Any, directory: Path) -> None:
    """Takes the place of ``Weights.load``: random weights where they are needed, and no files."""
    import torch

    with torch.no_grad():
        for tensor in weights.held.values():
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0, 0.6 / tensor.shape[-1] ** 0.5)


def table_shapes(weights: Any) -> dict[str, tuple[int, ...]]:
    """Takes the place of ``Weights.checkpoint_shapes``."""
    from miles_megatron.shapes import shapes

    return {n: s for e in weights.entries if e.name in weights.held for n, s in shapes(e, weights.a).items()}


@contextmanager
def computing(format: str) -> Iterator[None]:
    """What ``--backward-override`` says through the environment, for this format alone."""
    import megatron.core.fp8_utils as utils
    from transformer_engine.common.recipe import Float8BlockScaling, Format

    original = utils.get_fp8_recipe
    override = "dequantized" if format == "fp8" else None
    utils.get_fp8_recipe = lambda config: Float8BlockScaling(fp8_format=Format.E4M3, backward_override=override)
    try:
        yield
    finally:
        utils.get_fp8_recipe = original


def make_batch(count: int, length: int, vocabulary: int) -> Any:
    """Samples of one length, all tokens but 8 trained on."""
    import torch

    from miles_core.data import Sample, collate

    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(count):
        tokens = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        samples.append(Sample(tokens=tokens, response_length=length - 8, group_index=i, index=i))
    batch = collate(samples)
    batch.columns["weight"] = torch.randn(len(batch.tokens), generator=generator) / len(batch.tokens)
    return batch


def loss(output: Any, micro: Any, ctx: Any) -> Any:
    """Sum of column ``weight`` times log-prob: the work of any policy loss."""
    from miles_core.trainer import Loss

    return Loss(-(output.log_probs * micro.column("weight").to(output.log_probs.device)).sum())


def codec(fp8: bool) -> Any:
    """Of the blocks of 128 x 128, or of no format."""
    from miles_formats import Codec, FormatCodec
    from miles_fp8.format import Fp8

    return FormatCodec(Fp8()) if fp8 else Codec()


def make_trainer(given: Any, name: str, directory: Path, format: str = "bf16", rate: float = 1e-5) -> Any:
    """A bound trainer of this rank, and its sizes."""
    import torch
    import torch.distributed as dist

    from miles_core.trainer import Callbacks, OptimizerConfig
    from miles_megatron import families
    from miles_megatron.recipes import RECIPES
    from miles_megatron.sizes import Sizes
    from miles_megatron.trainer.build import FULL_RECOMPUTATION
    from miles_megatron.trainer.groups import start_groups

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    sizes = {k: int(v) if v.isdigit() else v == "True" for k, v in (p.split("=") for p in given.sizes)}
    s = Sizes(**{"ranks": ranks, "etp": 1 if "ep" in sizes else sizes.get("tp", 1), **sizes})
    world = start_groups(s, 0)
    from miles_megatron.trainer.settings import Settings
    from miles_megatron.trainer.trainer import MegatronTrainer
    from miles_megatron.trainer.weights import Weights

    Weights.load, Weights.checkpoint_shapes = fill, table_shapes  # type: ignore[method-assign, assignment]
    settings = Settings(
        adamw=OptimizerConfig(rate),
        dtype=torch.bfloat16,
        micro_batch_size=given.micro_batch_size,
        longest=given.length,
        model=(FULL_RECOMPUTATION if given.recompute else {}) | (RECIPES["fp8"] if format != "bf16" else {}),
    )
    checkpoint = make_checkpoint(name, directory)
    trainer = MegatronTrainer(
        families.read(MODELS[name]), s, world, checkpoint, settings, codec=codec(format != "bf16")
    )
    trainer.bind(Callbacks(trainer.forward, loss, trainer.optimizer_step))
    return trainer, s


def timed(trainer: Any, part: Any, steps: int) -> tuple[float, float]:
    """Seconds of a step, and bytes at the peak of this rank."""
    import torch

    for _ in range(2):
        trainer.step(part)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(steps):
        trainer.step(part)
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps, float(torch.cuda.max_memory_allocated())


def operations(a: Any, tokens: int, length: int) -> float:
    """Of a step: forward and backward."""
    from miles_megatron import count

    parts = count.model(a)
    used = parts.total - parts.experts - count.embedding(a).total
    if a.experts is not None:
        used += parts.experts * a.experts.top_k / a.experts.count
    return 6.0 * used * tokens + 6.0 * a.layers * tokens * length * a.q_size


def megatron(given: Any, name: str, directory: Path, format: str) -> dict[str, Any]:
    """One model's row in one format."""
    import torch

    from miles_megatron.memory import Work, memory

    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    trainer, s = make_trainer(given, name, directory, format)
    count = given.micro_batch_size * given.micro_batches * s.dp
    whole = make_batch(count, given.length, trainer.a.vocab)
    part = whole.select([i for i in range(count) if i % s.dp == trainer.world.replica])
    with nullcontext() if format == "bf16" else computing(format):
        seconds, peak = timed(trainer, part, given.steps)
    tokens = given.micro_batch_size * given.length
    work = Work(tokens=tokens, micro_batches=given.micro_batches, recompute="full" if given.recompute else "")
    planned = max(stage.total - stage.other for stage in memory(trainer.a, s, work))
    rate = operations(trainer.a, count * given.length, given.length) / seconds / s.ranks
    return {
        "model": name, "format": format, "sizes": given.sizes, "recompute": given.recompute, "seconds": round(seconds, 4),
        "share_of_bf16_peak": round(rate / PEAK[torch.cuda.get_device_capability()], 3),
        "peak_gb": round((peak - before) / 1e9, 2), "planned_gb": round(planned / 1e9, 2),
        "planned_to_peak": round(planned / (peak - before), 3),
    }  # fmt: skip


def embedded(given: Any, name: str, directory: Path) -> dict[str, Any]:
    """The embedded trainer on one GPU and the same samples."""
    import torch

    from miles_core.trainer import Callbacks, OptimizerConfig
    from miles_embedded import load_model
    from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

    gc.collect()
    torch.cuda.empty_cache()
    model = load_model(make_checkpoint(name, directory, weights=True), torch.bfloat16).cuda()
    config = TrainerConfig(OptimizerConfig(lr=1e-5), micro_batch_size=given.micro_batch_size)
    trainer = EmbeddedTrainer(model, config)
    trainer.bind(Callbacks(trainer.forward, loss, trainer.optimizer_step))
    count = given.micro_batch_size * given.micro_batches
    seconds, peak = timed(trainer, make_batch(count, given.length, MODELS[name]["vocab_size"]), given.steps)
    return {"model": name, "trainer": "embedded", "seconds": round(seconds, 4), "peak_gb": round(peak / 1e9, 2)}


def replay(given: Any, name: str, directory: Path) -> dict[str, Any]:
    """A step with r3 against one without, the same batch and trainer in turns."""
    from miles_core.trainer import Callbacks
    from miles_r3 import ROUTES
    from miles_r3.config import R3Config
    from miles_r3.hooks import R3

    gc.collect()
    trainer, _ = make_trainer(given, name, directory)
    batch = make_batch(given.micro_batch_size * given.micro_batches, given.length, trainer.a.vocab)
    batch.columns[ROUTES.name] = own_routes(given, trainer, batch)
    run = SimpleNamespace(plan=SimpleNamespace(fact=lambda name, default=None: trainer.a.experts.count))
    ways = {"off": trainer.forward, "on": R3(R3Config()).wrap_forward(run)(trainer.forward)}
    found: dict[str, list[float]] = {way: [] for way in ways}
    for way in ("off", "on") * given.steps:
        trainer.bind(Callbacks(ways[way], loss, trainer.optimizer_step))
        found[way].append(timed(trainer, batch, 1)[0])
    seconds = {way: statistics.median(times) for way, times in found.items()}
    return {"model": name, "replay": {w: round(t, 4) for w, t in seconds.items()},
            "overhead": round(seconds["on"] / seconds["off"] - 1, 4)}  # fmt: skip


def own_routes(given: Any, trainer: Any, batch: Any) -> Any:
    """[tokens, layers, k] what the routers choose: a layer's choices follow those of the layers before, so each pass is right one further."""
    import torch

    from miles_core.trainer import GIVEN_ROUTES, OWN_ROUTES, Callbacks

    experts, layers, tokens = trainer.a.experts, sum(trainer.a.sparse), given.micro_batch_size * given.length
    routes = torch.arange(experts.top_k, device="cuda").repeat(len(batch.tokens), layers, 1)
    number = 0

    def forward(chunk: Any, micro: Any, ctx: Any) -> Any:
        nonlocal number
        mine = routes[number * tokens : (number + 1) * tokens]
        number += 1
        ctx.attached[GIVEN_ROUTES] = mine[ctx.rows.clamp(min=0)]
        output = trainer.forward(chunk, micro, ctx)
        own = ctx.attached[OWN_ROUTES]
        real = ctx.rows >= 0
        mine[ctx.rows[real]] = torch.stack([own[i] for i in sorted(own)], 1)[real]
        return output

    trainer.bind(Callbacks(forward, loss, trainer.optimizer_step))
    for _ in range(layers + 1):
        number = 0
        trainer.log_probs(batch, "old")
    return routes.to(torch.int16).cpu()


def gradients(given: Any, name: str, directory: Path) -> dict[str, Any]:
    """How far the gradients of ``fp8_backward`` are from those of ``fp8``: |difference| / |gradient|, and the ratio of their norms; weights
    are not changed in between."""

    gc.collect()
    trainer, _ = make_trainer(given, name, directory, "fp8", rate=0.0)
    batch = make_batch(given.micro_batch_size, given.length, trainer.a.vocab)
    found, norms = {}, {}
    for format in ("fp8", "fp8_backward"):
        with computing(format):
            norms[format] = trainer.step(batch)["train/grad_norm"][0]
        found[format] = trainer.wrapped[0].buffers[0].grad_data / trainer.wrapped[0].buffers[0].grad_data.norm()
    cosine = float((found["fp8"] * found["fp8_backward"]).sum())
    return {"model": name, "distance": round(max(2 - 2 * cosine, 0) ** 0.5, 5),
            "norms": round(norms["fp8_backward"] / norms["fp8"], 5)}  # fmt: skip


def parity() -> dict[str, Any]:
    """What TransformerEngine's codes are to the format's: (how close, share of values that differ)."""
    import torch

    from miles_core.mismatch.parity import measure, probes
    from miles_fp8.format import Fp8
    from miles_megatron.trainer.quantizers import Blocks

    format = Fp8()
    real = {"normal": torch.randn(256, 4096), "small": torch.randn(256, 4096) * 1e-3}
    found = measure(format, Blocks(format), probes(format, real))
    return {k: (str(f.parity), f.differing) for k, f in zip(("weights", "activations"), found, strict=True)}


def versions() -> dict[str, str]:
    """Of what computes."""
    return installed("megatron-core", "transformer-engine", "torch")


def main() -> None:
    """Measure every model that was asked for, one after another."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--sizes", nargs="*", default=[], help="of miles_megatron.sizes.Sizes, as in tp=2 sequence=True"
    )
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--formats", nargs="+", choices=("bf16", "fp8", "fp8_backward"), default=["bf16"])
    for switch in ("--recompute", "--embedded", "--replay", "--parity", "--gradients"):
        parser.add_argument(switch, action="store_true")
    given = parser.parse_args()
    os.environ["NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = "1"  # TransformerEngine reads it when it is imported
    import torch
    import torch.distributed as dist

    if "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
    directory = Path(tempfile.gettempdir()) / "megatron_step"
    jobs = [(megatron, name, format) for name in given.models for format in given.formats]
    jobs += [(replay, name) for name in given.models if given.replay and "num_experts" in MODELS[name]]
    jobs += [(embedded, name) for name in given.models if given.embedded]
    jobs += [(gradients, name) for name in given.models[:1] if given.gradients]
    rows = []
    for job, name, *more in jobs:
        rows.append(job(given, name, directory, *more))
        if int(os.environ.get("RANK", "0")) == 0:
            print(rows[-1], flush=True)
    if int(os.environ.get("RANK", "0")) == 0:
        found = {"rows": rows} | ({"parity": parity()} if given.parity else {})
        found["gpus"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        models = [] if set(given.models) == set(MODELS) else given.models
        label = "-".join([*models, *(f for f in given.formats if f != "bf16"), *(["r3"] if given.replay else [])])
        finish("megatron_step", found, given.save, versions, label)


if __name__ == "__main__":
    main()
