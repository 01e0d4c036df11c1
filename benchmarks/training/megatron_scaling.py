"""Tokens per second of the Megatron trainer on one, two and four ranks, next to what the plan estimates.

The model is that of ``cluster_run.py``; a step is forward, backward and AdamW in BF16. *Strong* scaling keeps the samples of a step, *weak*
scaling keeps the samples per rank. Ranks divide the experts (``ep``), hold all of them (``dp``), or, four of them, divide tensors and layers
or tensors alone. The script starts its ranks itself, with ``--most 4`` also four::

    python benchmarks/training/megatron_scaling.py --save
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import finish, installed, options
from benchmarks.planning.cluster_options import SIZES
from benchmarks.planning.cluster_run import make_model, parameters_of
from benchmarks.training.megatron_divisions import launch, make_trainer
from benchmarks.training.megatron_step import make_batch

#: Ranks -> layout -> sizes.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"": {}},
    2: {"dp": {}, "ep": {"ep": 2}},
    4: {
        "dp": {},
        "ep": {"ep": 4},
        "tp2 pp2": {"tp": 2, "sequence": True, "pp": 2},
        "dp2 tp2": {"tp": 2, "sequence": True},
    },
}
WARM_UP, STEPS = 2, 4


def measure(trainer: Any, samples: int, length: int) -> float:
    """Return the median seconds of a step of so many samples over all ranks."""
    import torch.distributed as dist

    batch = make_batch(samples, length, trainer.a.vocab)
    part = batch.select([i for i in range(samples) if i % trainer.s.dp == trainer.world.replica])
    seconds = []
    for _ in range(WARM_UP + STEPS):
        dist.barrier()
        start = time.perf_counter()
        trainer.step(part)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:])


def rank(given: argparse.Namespace) -> None:
    """Measure on one rank."""
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    ranks, rows = dist.get_world_size(), []
    layers = json.loads((given.ranks / "model" / "config.json").read_text())["num_hidden_layers"]
    for name, sizes in LAYOUTS[ranks].items():
        if layers % sizes.get("pp", 1):
            print(f"left out: {name}, since stages cannot have equally many of {layers} layers", flush=True)
            continue
        trainer = make_trainer(
            given.ranks / "model", sizes, micro_batch_size=None, max_tokens=given.max_tokens, longest=given.length
        )
        for samples in sorted({given.samples, given.samples * ranks}):
            seconds = measure(trainer, samples, given.length)
            rows.append({"ranks": ranks, "layout": name, "samples": samples, "seconds": round(seconds, 4)})
            if dist.get_rank() == 0:
                print(rows[-1], flush=True)
        del trainer
        gc.collect()
    if dist.get_rank() == 0:
        (given.ranks / f"rows-{ranks}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def predict(given: argparse.Namespace, row: dict[str, Any], checkpoint: Path) -> float:
    """Return the seconds that the plan estimates for the training of a row."""
    from miles_core.config.load import load
    from miles_core.plugin.check import check
    from miles_core.plugin.model_config import model_config
    from miles_core.run.prepare import catalogue_for, facts_for, requested_plugins
    from miles_planner.layout import trainer_planner
    from miles_planner.model_cost import model_cost
    from miles_planner.rates import rates_of
    from miles_planner.training_time import training_time
    from miles_planner.workload import Workload

    sizes = LAYOUTS[row["ranks"]][row["layout"]]
    flags = f"""--hf-checkpoint {checkpoint} --save {checkpoint}-run --runtime ray --trainer megatron --engine sglang
        --actor-num-gpus-per-node {row["ranks"]} --expert-model-parallel-size {sizes.get("ep", 1)}
        --tensor-model-parallel-size {sizes.get("tp", 1)} --pipeline-model-parallel-size {sizes.get("pp", 1)}
        {"--sequence-parallel" if "sequence" in sizes else ""}
        --use-dynamic-batch-size --max-tokens-per-gpu {given.max_tokens} --prompt-data none.jsonl --num-rollout 1"""
    config = load(flags.split())
    catalogue = catalogue_for(config)
    facts = facts_for(config, [f"hardware=1x8x{given.gpu}"])
    result = check(requested_plugins(config, facts, catalogue), catalogue, facts)
    model = model_config(config.model.hf_checkpoint)
    assert model is not None
    cost, trainer = model_cost(model), trainer_planner("megatron").read(result.facts, model)
    assert cost is not None and trainer is not None
    work = Workload(row["samples"], 8.0, given.length - 8.0, given.length)
    return round(training_time(rates_of(given.gpu, 4), cost, trainer, work).seconds, 4)


def scaled(rows: list[dict[str, Any]], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Add tokens per second, and the efficiency: their ratio to the rate of one rank times the number of ranks."""
    alone = given.samples * given.length / rows[0]["seconds"]
    for row in rows:
        rate = row["samples"] * given.length / row["seconds"]
        kind = "strong" if row["samples"] == given.samples else "weak"
        row |= {"tokens_per_second": round(rate), "scaling": "" if row["ranks"] == 1 else kind}
        row["efficiency"] = round(rate / alone / row["ranks"], 3)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    parser.add_argument("--gpu", default="H100", help="for the estimates")
    parser.add_argument("--samples", type=int, default=64, help="per step of one rank")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--most", type=int, choices=(2, 4), default=2, help="ranks")
    parser.add_argument("--checkpoint", type=Path, help="directory of the model; made if it does not exist")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ranks:
        rank(given)
        return
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        checkpoint = make_model(given.size, given.checkpoint or scratch / "model")
        if given.checkpoint:
            (scratch / "model").symlink_to(checkpoint.absolute())
        same = ["--samples", given.samples, "--length", given.length, "--max-tokens", given.max_tokens]
        rows: list[dict[str, Any]] = []
        for ranks in (ranks for ranks in LAYOUTS if ranks <= given.most):
            launch(ranks, Path(__file__), ["--ranks", name, *map(str, same)])
            rows += json.loads((scratch / f"rows-{ranks}.json").read_text())
        rows = [row | {"planned": predict(given, row, checkpoint)} for row in scaled(rows, given)]
        parameters = parameters_of(checkpoint)
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "none"
    result = {"gpus": gpus, "parameters": parameters, "samples": given.samples, "length": given.length, "rows": rows}
    finish("megatron_scaling", result, given.save, lambda: installed("megatron-core", "torch"), given.size)


if __name__ == "__main__":
    main()
