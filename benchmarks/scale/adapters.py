"""Policies with adapters over one base: bytes per sync, step time and memory of 1, 4 and 16 policies.

Run: ``python benchmarks/scale/adapters.py --threads 1 --save`` (needs ``plugins/lora``). Every row trains the same number of samples per step,
divided among the policies; the policies generate their own samples. With the embedded engine, each number of policies has two rows: one
shared engine, and separate engines (``--lora-separate-engines``). Each row runs in its own process. On a CPU, the rows with the same number of
policies alternate, and times are processor time, which excludes other programs. With ``--engine sglang`` (needs ``plugins/sglang`` and
SGLang) all policies share one server. On a GPU the rows run one after the other, and times are wall time:

    python benchmarks/scale/adapters.py --engine sglang --device cuda --hidden 2048 --layers 12 --answer 128 --samples 256 --save --variant sglang-gpu

and the same with ``--engine embedded``. Memory is that of the process and of the processes that it starts, above that of an idle one (resident
memory in RAM, shared pages divided among processes; on a GPU the device's used memory), at the end of the last step; ``--schedule`` chooses another
schedule. A row ``1, merged`` sends all weights at each sync. ``gap`` is the mean difference of engine and trainer in log-probability. The last
line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Reporter, Worker, finish, installed, medians, options
from benchmarks.training.random_model import make_checkpoint

RANK, WARM_UP = 16, 1
TURNS = """
async def generate(args, sample, sampling_params):
    names = [name for name in {names}]
    sample.policy = names[sample.group_index % len(names)]
    turn = await args.ask(policy=sample.policy)
    sample.tokens, sample.response_length = turn.tokens, len(turn.response.tokens)
    return sample
"""
PROBE = """
import benchmarks.scale.adapters as measuring
from miles_core.plugin import hookimpl

@hookimpl
def wrap_learn(run, policy):
    return measuring.end_rollout

@hookimpl
def on_step(run, metrics):
    measuring.report(run, metrics)
"""
#: Samples of a prompt.
GROUP = 4
#: SGLang's options on each device; on a GPU, kernels that need no further package.
SGLANG: dict[str, dict[str, Any]] = {
    "cpu": {"sglang_lora_backend": "torch_native", "sglang_max_total_tokens": 16384},
    "cuda": {
        "sglang_attention_backend": "triton",
        "sglang_sampling_backend": "pytorch",
        "sglang_mem_fraction_static": 0.3,
    },
}
MERGED, ONE, SEPARATE = "merged", "one", "separate"
#: In a worker: sends the numbers of a step, idle memory, start of the step, and seconds of its rollout.
state: dict[str, Any] = {}


def measure(given: argparse.Namespace) -> None:
    """Train with ``--worker`` policies in this process, a step per turn."""
    import torch

    import miles_core.launch  # noqa: F401 - part of the idle process
    import miles_embedded.engine.engine
    import miles_embedded.trainer.trainer  # noqa: F401 - part of the idle process
    from miles_testing import toy_run

    torch.set_num_threads(given.threads)
    names = [f"policy-{n}" for n in range(given.worker)]
    state.update(reporter=Reporter(), device=given.device, idle=used(given.device), started=now(given.device))
    with tempfile.TemporaryDirectory() as directory:
        probe = Path(directory) / "probe.py"
        probe.write_text(PROBE)
        turns = Path(directory) / "turns.py"
        turns.write_text(TURNS.format(names=names))
        flags: dict[str, Any] = {
            "hf_checkpoint": given.checkpoint,
            "engine": given.engine,
            "device": given.device,
            "dtype": "bfloat16" if given.device == "cuda" else "float32",
            "schedule": given.schedule,
            "lora_sync": "merged" if given.kind == MERGED else "adapter",
            "lora_target_modules": "all-linear",
            "lora_rank": RANK,
            "policies": {name: {} for name in names},
            "custom_generate_function_path": turns,
            "rollout_batch_size": given.samples // GROUP,
            "n_samples_per_prompt": GROUP,
            "rollout_max_response_len": given.answer,
            "save_rollouts": False,
        }
        if given.kind == SEPARATE:
            flags["lora_separate_engines"] = True
        if given.engine == "sglang":
            flags |= SGLANG[given.device]
        toy_run(["lora", str(probe)], Path(directory) / "run", steps=WARM_UP + given.turns, **flags)


def end_rollout(inner: Any) -> Any:
    """Note the time from the start of the step to its first training pass."""

    async def learn(*given: Any) -> Any:
        state.setdefault("rollout", now(state["device"]) - state["started"])
        return await inner(*given)

    return learn


def report(run: Any, metrics: dict[str, Any]) -> None:
    """Send the numbers of a step that has ended, and wait for the next turn."""
    names = [policy.name for policy in run.policies]
    prefixes = [f"{name}/" for name in names] if len(names) > 1 else [""]
    rollout = state.pop("rollout")
    state["reporter"].send(
        step_seconds=now(state["device"]) - state["started"],
        rollout_seconds=rollout,
        tokens_per_second=metrics["rollout/tokens"] / rollout,
        sync_bytes_per_policy=metrics[f"{prefixes[0]}sync/bytes"],
        gap=statistics.mean(metrics[f"{prefix}mismatch/abs_log_prob"] for prefix in prefixes),
        memory_mb=used(state["device"]) - state["idle"],
    )
    state["reporter"].wait()
    state["started"] = now(state["device"])


def now(device: str) -> float:
    """Seconds: processor time of this process on a CPU, otherwise those of a clock."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def used(device: str) -> float:
    """Memory in MB: of the GPU, or of this process and all that it has started."""
    if device == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    import os

    return sum(share_of(pid) for pid in family(os.getpid())) / 1024


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    found = [pid]
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            found += family(int(child))
    return found


def share_of(pid: int) -> int:
    """Resident memory of a process in KB, with its share of pages that it shares; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def start(given: argparse.Namespace, count: int, kind: str, checkpoint: str) -> Worker:
    """Start a process of its own, which has run the steps of the warm-up."""
    code = "from benchmarks.scale.adapters import main; main()"
    words = [sys.executable, "-c", code, "--worker", str(count), "--kind", kind, "--checkpoint", checkpoint]
    for name in ("threads", "engine", "device", "answer", "samples", "turns", "schedule"):
        words += [f"--{name}", str(getattr(given, name))]
    worker = Worker(f"{count} {kind}", words, given.threads)
    for _ in range(WARM_UP - 1):
        worker.turn()
    return worker


def run_rows(given: argparse.Namespace, count: int, kinds: list[str], checkpoint: str) -> dict[str, Any]:
    """Measure all kinds for one number of policies. On a CPU they alternate; on a GPU, whose memory they would share, each runs alone."""
    reports: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for together in [kinds] if given.device == "cpu" else [[kind] for kind in kinds]:
        workers = {kind: start(given, count, kind, checkpoint) for kind in together}
        for _ in range(given.turns):
            for kind, worker in workers.items():
                reports[kind].append(worker.turn())
        for worker in workers.values():
            worker.close()
    return {kind: medians(found) | {"gap": float(f"{found[-1]['gap']:.3g}")} for kind, found in reports.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--policies", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--engine", default="embedded", choices=("embedded", "sglang"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--schedule", default="sync", help="sync, ahead or async")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="its layers")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--samples", type=int, default=64, help="samples of a step, of all policies together")
    parser.add_argument("--turns", type=int, default=5, help="steps that are counted")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--kind", default=ONE, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        measure(given)
        return
    heads = given.hidden // 64
    sizes = {"hidden_size": given.hidden, "intermediate_size": 3 * given.hidden, "num_hidden_layers": given.layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": max(heads // 4, 1), "head_dim": 64}
    names = ("threads", "engine", "device", "schedule", "hidden", "layers", "answer", "samples", "turns")
    result: dict[str, Any] = {name: getattr(given, name) for name in names} | {"rank": RANK, "rows": {}}
    with tempfile.TemporaryDirectory() as directory:
        result["parameters"] = make_checkpoint(
            "qwen3", Path(directory) / "model", sizes | {"vocab_size": 4096}, given.device
        )
        for count in given.policies:
            kinds = [MERGED, ONE] if count == 1 else [ONE, SEPARATE] if given.engine == "embedded" else [ONE]
            for kind, found in run_rows(given, count, kinds, f"{directory}/model").items():
                label = str(count) if kind == ONE else f"{count}, {kind}"
                result["rows"][label] = found
                print(f"{label:<14}", found, file=sys.stderr, flush=True)
    versions = (
        "miles-core",
        "miles-plugin-lora",
        "torch",
        "transformers",
        *(("sglang",) if given.engine == "sglang" else ()),
    )
    finish(Path(__file__).stem, result, given.save, lambda: installed(*versions), given.variant)


if __name__ == "__main__":
    main()
