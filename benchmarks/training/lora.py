"""Adapters against full training on the demo's task: learning curves, step time, memory, and the gap between engine and trainer.

Run: ``python benchmarks/training/lora.py --seeds 3 --threads 8 --save`` (needs ``plugins/lora``, and ``plugins/int4`` for the encoded base). For
every seed one supervised warm start, then reinforcement learning from it with each mode, in a process of its own, whose largest resident memory is
measured. Intervals are 95 % of Student's t over the seeds.

``--memory`` measures the largest resident memory of two steps of a larger random model (``--hidden``, ``--layers``), above that of an idle process,
for full training, adapters, a base in INT4 or FP8, and four policies over one base, in a process each. With ``--device cuda`` it measures the GPU's
memory instead, and the time of a training step: the median of ``--turns`` after two that warm up (seconds are comparable with ``--memory-jobs 1``
only). It needs no network. On one GPU:

    python benchmarks/training/lora.py --modes --memory --device cuda --hidden 2048 --layers 12 --answer 128 --samples 64 --save

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.formats.formats_in_the_loop import train, warm_start
from benchmarks.learning.seeds import change_of, mean_of, work_in_processes
from benchmarks.measure import finish, installed, options
from benchmarks.training.forked import Clock, in_fork
from benchmarks.training.random_model import import_family, make_checkpoint

RANK, ALPHA = 16, 32
LORA = f"--plugins lora --lora-rank {RANK} --lora-alpha {ALPHA} --lora-target-modules all-linear"
EXPERTS = f"{LORA},all-experts"
ENCODED = f"{EXPERTS.replace('lora ', 'lora,int4 ', 1)} --train-precision int4 --rollout-precision int4 --int4-group-size 32 --emulate-precision"
MODES = {
    "full": "",
    "lora": LORA,
    "lora experts": EXPERTS,
    "lora experts adapter": f"{EXPERTS} --lora-sync adapter",
    "lora int4 base": f"{ENCODED} --lora-sync adapter",
}


def learn(given: argparse.Namespace) -> dict[str, Any]:
    """One run in this process: accuracy over the steps, seconds, gap, bytes of a sync, and largest resident memory."""
    import torch

    torch.set_num_threads(given.threads)
    steps, flags = given.steps, MODES[given.mode].split()
    rate = given.lr_lora if given.mode != "full" else given.lr
    more = [
        "--hf-checkpoint",
        str(Path(given.worker) / "start"),
        "--num-rollout",
        str(steps),
        "--lr",
        str(rate),
        *flags,
    ]
    more += ["--eval-interval", str(max(steps // 4, 1)), "--n-samples-per-eval-prompt", "4"]
    metrics = train(Path(given.worker), given.mode.replace(" ", "-"), more, given.seed)
    trained = [m for m in metrics if "train/loss" in m]

    def middle(name: str) -> float:
        return float(statistics.median(m[name] for m in trained if name in m))

    return {
        "accuracy": [m["eval/accuracy"] for m in metrics if "eval/accuracy" in m],
        "seconds": middle("time/step"),
        "abs_log_prob": middle("mismatch/abs_log_prob"),
        "sync_bytes": middle("sync/bytes"),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def curves(given: argparse.Namespace) -> dict[str, Any]:
    """Run every mode with every seed, ``--jobs`` of them at a time."""
    seeds = range(given.seeds)
    with tempfile.TemporaryDirectory() as directory:
        start = [(Path(directory) / str(seed), seed) for seed in seeds]
        work_in_processes(warm_start, start, given.jobs, given.threads, steps=given.warm_start)
        keys = [(seed, mode) for mode in given.modes for seed in seeds]
        with ThreadPoolExecutor(given.jobs) as pool:  # every run has a process of its own
            done = pool.map(lambda key: run_mode(given, Path(directory), *key), keys)
            found = dict(zip(keys, done, strict=True))
    return {
        mode: {
            "options": MODES[mode],
            **summary([found[seed, mode] for seed in seeds], [found[seed, given.modes[0]] for seed in seeds]),
        }
        for mode in given.modes
    }


def run_mode(given: argparse.Namespace, directory: Path, seed: int, mode: str) -> dict[str, Any]:
    """Run ``learn`` in a process."""
    words = [sys.executable, __file__, "--worker", str(directory / str(seed)), "--mode", mode, "--seed", str(seed)]
    for name in ("steps", "threads", "lr", "lr_lora"):
        words += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"seed {seed}  {mode:<22}", found, file=sys.stderr, flush=True)
    return found


def summary(runs: Sequence[dict[str, Any]], first: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds; accuracies with intervals, and their difference from the first mode's, paired by seed."""
    last = [run["accuracy"][-1] - other["accuracy"][-1] for run, other in zip(runs, first, strict=True)]
    found: dict[str, Any] = {
        "curve": [mean_of(values) for values in zip(*(r["accuracy"] for r in runs), strict=True)],
        "accuracy": change_of([(r["accuracy"][0], r["accuracy"][-1]) for r in runs]),
        "minus_first_mode": mean_of(last),
    }
    return found | {
        n: float(f"{statistics.mean(r[n] for r in runs):.4g}")
        for n in ("seconds", "abs_log_prob", "sync_bytes", "peak_mb")
    }


#: Mode of the memory measurement -> plugins, and options of a toy run.
MEMORY: dict[str, tuple[list[str], dict[str, Any]]] = {
    "full": ([], {}),
    "lora merged": (["lora"], {"lora_target_modules": "all-linear", "lora_rank": RANK}),
    "lora adapter": (["lora"], {"lora_target_modules": "all-linear", "lora_rank": RANK, "lora_sync": "adapter"}),
    "lora int4 base": (
        ["lora", "int4"],
        {
            **{
                "lora_target_modules": "all-linear",
                "lora_rank": RANK,
                "lora_sync": "adapter",
                "emulate_precision": True,
            },
            **{"train_precision": "int4", "rollout_precision": "int4"},
        },
    ),
    "lora fp8 base": (
        ["lora", "fp8"],
        {
            **{
                "lora_target_modules": "all-linear",
                "lora_rank": RANK,
                "lora_sync": "adapter",
                "emulate_precision": True,
            },
            **{"train_precision": "fp8", "rollout_precision": "fp8"},
        },
    ),
    "lora adapter, four policies": (
        ["lora"],
        {"lora_target_modules": "all-linear", "lora_rank": RANK, "lora_sync": "adapter"},
    ),
}
#: Steps of a memory measurement that are not timed.
WARM_UP = 2
POLICIES = ("a", "b", "c", "d")
#: Each policy answers every fourth prompt, with its own adapter.
TURNS = f"""
async def generate(args, sample, sampling_params):
    sample.policy = {POLICIES}[sample.group_index % {len(POLICIES)}]
    turn = await args.ask(policy=sample.policy)
    sample.tokens, sample.response_length = turn.tokens, len(turn.response.tokens)
    return sample
"""


def hold(given: argparse.Namespace, mode: str, checkpoint: str) -> dict[str, Any]:
    """Some steps of a run in this process: the memory that it took, and the seconds that its training took per step."""
    import torch

    import miles_core.launch  # noqa: F401 - part of the idle process
    import miles_embedded.trainer.trainer  # noqa: F401 - part of the idle process
    from miles_testing import toy_run

    torch.set_num_threads(given.threads)
    plugins, flags = MEMORY[mode]
    more: dict[str, Any] = {"hf_checkpoint": checkpoint, "dtype": "bfloat16", "save_rollouts": False, **flags}
    more |= {
        "device": given.device,
        "rollout_max_response_len": given.answer,
        "n_samples_per_prompt": given.samples // 2,
    }
    if given.device == "cuda":
        more.pop("emulate_precision", None)
    with tempfile.TemporaryDirectory() as directory:
        if "four" in mode:
            (Path(directory) / "four.yaml").write_text(json.dumps({"policies": {name: {} for name in POLICIES}}))
            (Path(directory) / "turns.py").write_text(TURNS)
            more |= {"config": f"{directory}/four.yaml", "rollout_batch_size": 4}
            more["custom_generate_function_path"] = f"{directory}/turns.py"
        idle, start = resident(), time.perf_counter()
        done = toy_run(plugins, Path(directory) / "run", steps=WARM_UP + given.turns, **more)
        peak, after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, resident()
    if len(done.metrics) != WARM_UP + given.turns:  # a signal, such as a time limit, stops a run after a complete step
        raise SystemExit(f"{mode}: stopped after {len(done.metrics)} of {WARM_UP + given.turns} steps")
    print(f"{mode}: {describe_time(done.metrics, time.perf_counter() - start)}", file=sys.stderr, flush=True)
    gaps = [value for name, value in done.metrics[-1].items() if name.endswith("mismatch/abs_log_prob")]
    found: dict[str, Any] = {"abs_log_prob": float(f"{statistics.mean(gaps):.4g}")}
    for phase in ("train", "rollout", "step"):
        seconds = [m[f"time/{phase}"] for m in done.metrics[WARM_UP:]]
        found[f"{phase}_seconds"] = float(f"{statistics.median(seconds):.4g}")
    if given.device == "cuda":
        return found | {
            "gpu": torch.cuda.get_device_name(),
            "peak_mb": round(torch.cuda.max_memory_allocated() / 2**20),
            "after_mb": round(torch.cuda.memory_allocated() / 2**20),
        }
    return found | {"peak_mb": round(peak - idle), "after_mb": round(after - idle)}


def describe_time(metrics: Sequence[dict[str, float]], seconds: float) -> str:
    """Return the seconds of a run by phase, over all steps."""
    names = {name for m in metrics for name in m if name.startswith("time/") and name != "time/step"}
    phases = {name.removeprefix("time/"): sum(m.get(name, 0.0) for m in metrics) for name in names}
    return f"{seconds:.1f} s, " + ", ".join(f"{n} {s:.1f}" for n, s in sorted(phases.items(), key=lambda i: -i[1]))


def resident() -> float:
    """Resident memory of this process in MB."""
    import gc

    gc.collect()
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


def memory(given: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure modes of ``MEMORY``; ``keep`` receives the result after each mode."""
    sizes = {"hidden_size": given.hidden, "intermediate_size": 3 * given.hidden, "num_hidden_layers": given.layers}
    sizes |= {
        "num_attention_heads": given.hidden // 64,
        "num_key_value_heads": max(given.hidden // 256, 1),
        "head_dim": 64,
        "vocab_size": 4096,
    }
    found: dict[str, Any] = {}
    clock = Clock()
    alone = given.device == "cuda" and given.memory_jobs == 1
    if alone:
        import_family("qwen3")
        clock.note("imports")
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = f"{directory}/model"
        found["parameters"] = make_checkpoint("qwen3", Path(checkpoint), sizes, given.device)
        clock.note("checkpoint")

        def take(mode: str, numbers: dict[str, Any]) -> None:
            found[mode] = numbers
            print(f"memory  {mode:<30}", numbers, file=sys.stderr, flush=True)
            keep({"parameters": found["parameters"], **{m: found[m] for m in MEMORY if m in found}})

        if alone:
            for mode in given.memory_modes:
                take(mode, in_fork(partial(hold, given, mode, checkpoint)))
                clock.note(mode)
            return
        with ThreadPoolExecutor(given.memory_jobs) as pool:
            waiting = [pool.submit(measure_memory, given, mode, checkpoint) for mode in given.memory_modes]
            for done in as_completed(waiting):
                take(*done.result())


def measure_memory(given: argparse.Namespace, mode: str, checkpoint: str) -> tuple[str, dict[str, Any]]:
    """Run ``hold`` in a new interpreter."""
    words = [sys.executable, __file__, "--worker", "hold", "--mode", mode, "--checkpoint", checkpoint]
    words += ["--threads", str(given.threads), "--device", given.device, "--turns", str(given.turns)]
    words += ["--answer", str(given.answer), "--samples", str(given.samples)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    # a mode that does not fit into the memory is a result, too
    return mode, json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"failed": done.returncode}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=40, help="reinforcement-learning steps")
    parser.add_argument("--warm-start", type=int, default=400, help="supervised steps before them")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES), help="modes to run")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of full training")
    parser.add_argument("--lr-lora", type=float, default=5e-3, help="learning rate of adapters")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--memory", action="store_true", help="measure memory with a larger model too")
    parser.add_argument("--memory-modes", nargs="+", default=list(MEMORY), choices=list(MEMORY), help="modes of it")
    parser.add_argument(
        "--memory-jobs", type=int, default=1, help="memory measurements at the same time, which slows each down"
    )
    parser.add_argument("--turns", type=int, default=2, help="timed steps of a memory measurement")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of that model")
    parser.add_argument("--layers", type=int, default=8, help="its layers")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device of the memory measurement")
    parser.add_argument("--answer", type=int, default=4, help="tokens of an answer in the memory measurement")
    parser.add_argument("--samples", type=int, default=8, help="samples of a step in the memory measurement")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    for name in ("--worker", "--mode", "--checkpoint"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        done = hold(given, given.mode, given.checkpoint) if given.worker == "hold" else learn(given)
        print(json.dumps(done))
        return
    result: dict[str, Any] = {
        n: getattr(given, n) for n in ("seeds", "steps", "warm_start", "lr", "lr_lora", "threads")
    }
    versions = ("miles-core", "miles-plugin-lora", "torch", "transformers", "peft")

    def save(quiet: bool) -> None:
        finish(Path(__file__).stem, result, given.save, lambda: installed(*versions), given.variant, quiet)

    def keep(found: dict[str, Any]) -> None:
        sizes = {
            name: getattr(given, name) for name in ("hidden", "layers", "answer", "samples", "memory_jobs", "turns")
        }
        result["memory"] = {**sizes, **found}
        save(quiet=True)

    result["modes"] = curves(given) if given.modes else {}
    if given.memory:
        memory(given, keep)
    save(quiet=False)


if __name__ == "__main__":
    main()
