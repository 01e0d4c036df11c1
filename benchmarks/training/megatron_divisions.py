"""A step of the Megatron trainer on two or four ranks, divided in every way, against the same step on one: gradient norm, log-probabilities, weights.

A small random mixture of experts (4 layers, 8 experts) takes one step of AdamW at 1e-3 over 12 samples of 200 tokens; log-probabilities are
compared before and after it, and the weights that are exported then. GPUs compute in BF16 with NCCL and TransformerEngine, a machine
without any in float32 with gloo and Megatron-Core's own modules. Differences are the largest ones; in BF16 log-probabilities move by tenths
with the order of sums.
The script starts its ranks itself. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.training.megatron_step import loss, make_batch

#: Ranks -> how they divide the work, as ``miles_megatron.sizes.Sizes`` says it. Ranks that nothing divides hold replicas.
DIVISIONS: dict[int, tuple[dict[str, Any], ...]] = {
    1: ({},),
    2: (
        {},
        {"tp": 2, "sequence": True},
        {"pp": 2},
        {"pp": 2, "virtual": 2},
        {"ep": 2},
        {"cp": 2},
        {"pp": 2, "virtual": 3, "embedding": True, "loss": True},
    ),
    4: (
        {},
        {"tp": 2, "sequence": True, "pp": 2},
        {"ep": 4},
        {"tp": 2, "sequence": True},
        {"ep": 2},
        {"pp": 2, "ep": 2},
        {"tp": 2, "sequence": True, "cp": 2},
        {"pp": 4},
    ),
}
SAMPLES, LENGTH = 12, 200


def make_checkpoint(directory: Path) -> Path:
    """The model, in BF16."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, num_hidden_layers=4, hidden_size=512, intermediate_size=1024, moe_intermediate_size=256, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=8, num_key_value_heads=4, head_dim=64, norm_topk_prob=True,
        tie_word_embeddings=False, initializer_range=0.03, max_position_embeddings=1024,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory / "model")
    return directory / "model"


def make_trainer(checkpoint: Path, sizes: dict[str, Any], **settings: Any) -> Any:
    """A bound trainer of this rank. settings: fields of ``miles_megatron.trainer.settings.Settings``."""
    import torch
    import torch.distributed as dist

    from miles_core.trainer import Callbacks, OptimizerConfig
    from miles_megatron import families
    from miles_megatron.sizes import Sizes
    from miles_megatron.trainer.groups import start_groups
    from miles_megatron.trainer.without_cuda import adapt_modules, without_cuda

    gpu = torch.cuda.is_available()
    s = Sizes(ranks=dist.get_world_size(), etp=1 if "ep" in sizes else sizes.get("tp", 1), **sizes)
    with without_cuda():
        world = start_groups(s, 0)
        adapt_modules()
        from miles_megatron.trainer.settings import Settings
    from miles_megatron.trainer.trainer import MegatronTrainer

    fields = {"micro_batch_size": 3, "longest": 256, **settings}
    dtype = torch.bfloat16 if gpu else torch.float32
    chosen = Settings(adamw=OptimizerConfig(1e-3), dtype=dtype, **fields)
    architecture = families.read(json.loads((checkpoint / "config.json").read_text()))
    trainer = MegatronTrainer(architecture, s, world, checkpoint, chosen)
    trainer.bind(Callbacks(trainer.forward, loss, trainer.optimizer_step))
    return trainer


def stepped(checkpoint: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    """Of one step: gradient norm, log-probabilities of all samples before and after it, exported weights."""
    import torch
    import torch.distributed as dist

    trainer = make_trainer(checkpoint, sizes)
    batch = make_batch(SAMPLES, LENGTH, trainer.a.vocab)
    mine = [i for i in range(SAMPLES) if i % trainer.s.dp == trainer.world.replica]
    part = batch.select(mine)
    rows = torch.cat([torch.arange(LENGTH) + LENGTH * i for i in mine])

    def log_probs() -> torch.Tensor:
        whole = torch.zeros(len(batch.tokens), device=trainer.device)
        whole[rows] = trainer.log_probs(part, "old")["log_probs"].to(whole)
        if trainer.s.dp > 1:  # each sample is on one replica, which may have several ranks
            dist.all_reduce(whole, dist.ReduceOp.MIN)
        return whole.cpu()

    before = log_probs()
    norm = trainer.step(part)["train/grad_norm"][0]
    after = log_probs()
    units = trainer.units(everywhere=True)
    weights = {name: t.float().cpu().clone() for unit in units for name, t in unit.tensors.items()}
    return {"dp": trainer.s.dp, "norm": float(norm), "before": before, "after": after, "weights": weights}


def rank(directory: Path) -> None:
    """One rank: alone it makes what is compared with; several compare."""
    import torch
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    one, rows = directory / "one.pt", []
    for sizes in DIVISIONS[dist.get_world_size()]:
        found = stepped(directory / "model", sizes)
        if dist.get_world_size() == 1:
            torch.save(found, one)
            continue
        row = compared(sizes, found.pop("dp"), found, torch.load(one))
        rows.append(row)
        if dist.get_rank() == 0:
            print(row, flush=True)
        del found
        gc.collect()
    if rows and dist.get_rank() == 0:
        (directory / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def compared(sizes: dict[str, Any], dp: int, found: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """The largest differences, and that of the norms in parts of them."""
    moved = {name: float((found[name] - one[name]).abs().max()) for name in ("before", "after")}
    weights = max(float((t - one["weights"][name]).abs().max()) for name, t in found["weights"].items())
    return {
        "sizes": sizes | ({"dp": dp} if dp > 1 else {}),
        "grad_norm": found["norm"],
        "grad_norm_off": round(found["norm"] / one["norm"] - 1, 6),
        "log_probs": {"before": round(moved["before"], 6), "after": round(moved["after"], 6)},
        "weights": round(weights, 6),
    }


def launch(ranks: int, script: Path, flags: list[str]) -> None:
    """Run a script as so many ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    how = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(port)]
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    subprocess.run([sys.executable, *how, str(script), *flags], check=True, stdout=sys.stderr, env=environment)


def main() -> None:
    """Start one rank, then several, and save what they found."""
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank(given.directory)
        return
    import torch

    with tempfile.TemporaryDirectory() as scratch:
        make_checkpoint(Path(scratch))
        for ranks in (1, given.ranks):
            launch(ranks, Path(__file__), ["--directory", scratch])
        rows = json.loads((Path(scratch) / "rows.json").read_text())
    gpu = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    packages = ("megatron-core", *(("transformer-engine",) if gpu else ()), "torch")
    finish(
        "megatron_divisions",
        {"gpus": gpu, "rows": rows},
        given.save,
        lambda: installed(*packages),
        "-".join([*(["gpu"] if gpu else []), *([f"{given.ranks}-ranks"] if given.ranks > 2 else [])]),
    )


if __name__ == "__main__":
    main()
