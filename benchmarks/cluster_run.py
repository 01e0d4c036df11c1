"""A run under Ray with two Megatron ranks and two SGLang engines, an engine and a rank killed on the way, next to its prediction.

A random mixture of experts (``--size 1b``: 1.1 B parameters, ``large``: 1.9 B) trains with ``r3,tis,fp8,zero_copy``; on two GPUs ranks and
engines take turns (``--colocate``). After ``--kill-engine`` steps the script sends SIGKILL to one engine, after ``--kill-rank`` steps to one
rank. The result has the seconds of each phase (medians of the undisturbed steps), what each kill cost, the memory that the plan predicts and
the GPUs' peaks, and the step that ``miles_planning`` and ``miles simulate`` predict for the lengths that the run saved::

    python benchmarks/cluster_run.py --save

``--size tiny --device cpu`` rehearses it on a machine without GPUs. ``--warm`` runs one step of a model of two layers on one GPU instead, with
the same options of SGLang, so that later runs find compiled kernels.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import commit, finish, installed, options
from sglang_engine import EXPERTS, VOCABULARY, word_tokenizer
from sglang_step import workload

SIZES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "num_hidden_layers": 9, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    "large": {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
}  # fmt: skip
#: Options that give the same model and run to the prediction.
GPU = """--sglang-attention-backend triton --sglang-sampling-backend pytorch --sglang-moe-runner-backend triton
    --sglang-fp8-gemm-backend triton --sglang-disable-prefill-cuda-graph --sglang-mem-fraction-static 0.4"""


def make_model(size: str, directory: Path, layers: int | None = None) -> Path:
    """Save a random checkpoint unless the directory exists; return it."""
    if directory.exists():
        return directory
    import transformers

    experts = EXPERTS if size != "tiny" else EXPERTS | {"num_experts": 4, "moe_intermediate_size": 128}
    sizes: dict[str, Any] = SIZES[size] | ({"num_hidden_layers": layers} if layers else {})
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, max_position_embeddings=4096, eos_token_id=1, pad_token_id=0, tie_word_embeddings=False,
        intermediate_size=2 * sizes["hidden_size"], **sizes, **experts,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    word_tokenizer().save_pretrained(directory)
    return directory


def parameters_of(checkpoint: Path) -> int:
    """Return the number of parameters of a checkpoint."""
    from miles_core.trainer import CheckpointFiles

    return sum(math.prod(entry.shape) for entry in CheckpointFiles(checkpoint).entries.values())


def flags_of(given: Any, checkpoint: Path, directory: Path) -> list[str]:
    """Return the options of the run."""
    cpu = given.device == "cpu"
    if given.warm:
        place, plugins, steps, tokens = (
            "--engine sglang --no-self-check",
            given.plugins.replace(",zero_copy", ""),
            1,
            16,
        )
    else:
        ranks = 1 if given.separate else 2
        place = f"--runtime ray --trainer megatron --engine sglang --actor-num-gpus-per-node {ranks}"
        place += f" --expert-model-parallel-size {ranks}" * (ranks > 1) + " --rollout-num-gpus 2" * (ranks > 1)
        place += " --colocate" * (not cpu and ranks > 1) + " --max-restarts 4 --worker-timeout 120"
        plugins, steps, tokens = given.plugins, given.steps, given.tokens
    samples = given.prompts * 8
    text = f"""--hf-checkpoint {checkpoint} --save {directory / "run"} {place} --plugins {plugins} --rollout-batch-size {given.prompts}
        --n-samples-per-prompt 8 --num-rollout {steps} --rollout-max-response-len {tokens} --rollout-max-context-len {given.tokens + 72}
        --max-running-requests {samples} --use-dynamic-batch-size --max-tokens-per-gpu {given.max_tokens} --lr 1e-6 --seed 0
        --save-interval {given.save_interval}"""
    if cpu:
        text += " --device cpu --sglang-max-total-tokens 8192"
    else:
        text += f" {GPU} --sglang-cuda-graph-bs-decode {samples // 8},{samples // 2}"
    if "fp8" in plugins:
        text += " --fp8-recipe blockwise" + " --backward-override dequantized" * (not given.warm)
    return [*text.split(), *workload(directory, given.prompts)]


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of the completed steps."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "time/step" in row]


def find_worker(run: Path, name: str) -> int | None:
    """Return the process id of a worker from its log, that of the newest process."""
    log = run / "workers" / f"{name}.log"
    found = re.findall(r"process (\d+) on", log.read_text(errors="replace")) if log.exists() else []
    return int(found[-1]) if found else None


def drive(given: Any, command: list[str], run: Path) -> dict[str, Any]:
    """Run the command, kill an engine and a rank on the way; return what happened, with seconds since the start."""
    start, kills, peaks = time.monotonic(), [], [0, 0]
    todo = [(given.kill_engine, "engine-1"), (given.kill_rank, "trainer-1")]
    todo = [(step, name) for step, name in todo if step and not given.separate and not given.warm]
    log = run.parent / "output.log"
    first, seen = None, 0
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        while process.poll() is None and time.monotonic() - start < (given.seconds if first else given.first):
            time.sleep(0.5)
            peaks = [max(pair) for pair in zip(peaks, used_memory(), strict=True)]
            steps, now = len(read_steps(run)), round(time.monotonic() - start, 1)
            if steps != seen:
                print(f"{steps} steps after {now} s", file=sys.stderr, flush=True)
            first, seen = first or (now if steps else None), steps
            if todo and steps >= todo[0][0] and (found := find_worker(run, todo[0][1])) is not None:
                os.kill(found, signal.SIGKILL)
                kills.append({"worker": todo.pop(0)[1], "after_steps": steps, "at": now})
                print(f"killed: {kills[-1]}", file=sys.stderr, flush=True)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if given.logs:
        given.logs.write_text(read_logs(log, run))
    text = log.read_text(errors="replace")
    return {
        "exit": process.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "first_step_after": first,
        "kills": kills,
        "peak_gb": [round(peak / 1e9, 2) for peak in peaks],
        "notices": [line[:300] for line in text.splitlines() if re.search(" (WARNING|ERROR) (?!\\S+: megatron)", line)][
            :12
        ],
        "end_of_log": text[-3000:] if process.returncode else "",
    }


def read_logs(log: Path, run: Path) -> str:
    """Return the run's output and the ends of its workers' and engines' logs."""
    found = [f"== output\n{log.read_text(errors='replace')[-200_000:]}"]
    for path in sorted([*run.glob("workers/*"), *run.glob("**/sglang*.log")]):
        found.append(f"== {path.relative_to(run)}\n{path.read_text(errors='replace')[-20_000:]}")
    return "\n".join(found)


def used_memory() -> list[int]:
    """Return the used bytes of the first two GPUs, of all processes."""
    if not torch.cuda.is_available():
        return [0, 0]
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [int(line) << 20 for line in done.stdout.split()]
    return ([*found, 0, 0])[:2]


def medians(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians over the steps, without the first two, which compile."""
    rows = steps[2:] or steps
    names = [n for n in rows[0] if n.startswith(("time/", "mismatch/abs", "r3/", "sync/")) or n.endswith("per_second")]
    return {name: round(statistics.median(row[name] for row in rows if name in row), 4) for name in names}


def lost_seconds(steps: list[dict[str, Any]]) -> list[float]:
    """Return the seconds of the steps that took more than twice the median, less the median: what restarts cost."""
    usual = statistics.median(row["time/step"] for row in steps)
    return [round(row["time/step"] - usual, 1) for row in steps[2:] if row["time/step"] > 2 * usual]


def predict(given: Any, flags: list[str], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the plan's memory and the estimates of a step, for the lengths that the run measured."""
    from miles_core.config.load import load
    from miles_core.plugin.check import check
    from miles_core.plugin.model_config import model_config
    from miles_core.run.prepare import catalogue_for, facts_for, requested_plugins
    from miles_planning.layout import engine_planner, trainer_planner
    from miles_planning.model_cost import model_cost
    from miles_planning.rates import rates_of
    from miles_planning.rollout_time import rollout_time
    from miles_planning.step_time import step_time
    from miles_planning.training_time import training_time
    from miles_planning.workload import Workload

    config = load([*flags, "--device", "cuda"] if given.device == "cpu" else flags)
    catalogue = catalogue_for(config)
    facts = facts_for(config, [f"hardware=1x2x{given.gpu}"])
    result = check(requested_plugins(config, facts, catalogue), catalogue, facts)
    model = model_config(config.model.hf_checkpoint)
    assert model is not None
    cost, rates = model_cost(model), rates_of(given.gpu, 2)
    trainer = trainer_planner("megatron").read(result.facts, model)
    engine = engine_planner("sglang").read(result.facts, model, 1 if given.separate else 2)
    assert cost is not None and trainer is not None and engine is not None
    mean = statistics.median(row["rollout/length_mean"] for row in steps)
    work = Workload(given.prompts * 8, 64.0, mean, given.tokens, 1, 1, 0)
    generated = rollout_time(rates, cost, engine, work)
    trained = training_time(rates, cost, trainer, work, not given.separate)
    step = step_time(rates, generated, trained, engine, work, not given.separate)
    return {
        "problems_of_the_plan": [f"{p.who} needs {p.needs}: {p.because}" for p in result.problems],
        "trainer_gb": round(max(usage.parts.total for usage in trainer.estimate()) / 1e9, 2),
        "engine_gb": round(max(usage.parts.total for usage in engine.estimate()) / 1e9, 2),
        "seconds": {
            "rollout": round(generated.seconds, 3),
            "train": round(trained.seconds - trained.moved, 3),
            "moves": round(trained.moved, 3),
            "sync": round(step.sync, 3),
            "step": round(step.seconds, 3),
        },
    }


def simulate(given: Any, checkpoint: Path, run: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """Return what ``miles simulate`` reports for the lengths that the run saved.

    Args:
        seconds: the estimates of ``predict``, which has the moves of the memory and the sync of a model of this size.
    """
    gpus = ["--trainer-gpus", "1"] if given.separate else ["--trainer-gpus", "2", "--colocate"]
    command = [
        sys.executable, "-m", "miles_core", "simulate", "--json", "--model-config", str(checkpoint / "config.json"), "--gpu", given.gpu,
        "--engine-gpus", "1" if given.separate else "2", *gpus, "--rollout-batch-size", str(given.prompts),
        "--n-samples-per-prompt", "8", "--rollout-max-response-len", str(given.tokens), "--num-rollout", "6",
        "--lengths", f"replay:{run}", "--prompt-lengths", "constant:64", "--sync-seconds", str(seconds["sync"]),
        "--switch-seconds", str(seconds["moves"] / 4),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    try:
        found = dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return {"failed": done.stderr[-500:], "output": done.stdout[-500:]}
    return found


def parts_of(given: Any, checkpoint: Path, directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield the named parts of the result."""
    flags, run = flags_of(given, checkpoint, directory), directory / "run"
    yield "flags", " ".join(flags).replace(str(directory), "DIR").replace(str(checkpoint), "MODEL")
    yield "run", drive(given, [sys.executable, "-m", "miles_core", "train", *flags], run)
    steps = read_steps(run)
    yield "steps", len(steps)
    if not steps or given.warm:
        return
    yield "seconds_of_steps", [round(row["time/step"], 2) for row in steps]
    yield "medians", medians(steps)
    yield "restarts_cost", lost_seconds(steps)
    try:
        predicted = predict(given, flags, steps)
        yield "predicted", predicted
        yield "simulated", simulate(given, checkpoint, run, predicted["seconds"])
    except Exception as error:  # a prediction that fails must not lose the measurements
        yield "prediction_failed", f"{type(error).__name__}: {error}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--separate", action="store_true", help="one rank and one engine on separate GPUs")
    parser.add_argument("--warm", action="store_true", help="one step on one GPU, to compile kernels")
    parser.add_argument("--plugins", default="r3,tis,fp8,zero_copy")
    parser.add_argument("--gpu", default="H100", help="for the predictions")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="longest response")
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-interval", type=int, default=10)
    parser.add_argument("--kill-engine", type=int, default=5, help="after this many steps; 0: no kill")
    parser.add_argument("--kill-rank", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=280, help="then the run is stopped")
    parser.add_argument("--first", type=float, default=200, help="stopped earlier if no step is complete by then")
    parser.add_argument("--checkpoint", type=Path, help="directory of the model; made if it does not exist")
    parser.add_argument("--directory", type=Path, help="for the run's files (default: temporary files)")
    parser.add_argument("--out", type=Path, help="also write the parts here as they are measured")
    parser.add_argument("--logs", type=Path, help="write the logs of the run and its workers here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        directory = Path(name)
        checkpoint = make_model(given.size, given.checkpoint or directory / "model", 2 if given.warm else None)
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}" if torch.cuda.is_available() else "none"
        found: dict[str, Any] = {"gpus": gpus, "commit": commit(), "parameters": parameters_of(checkpoint)}
        for part, value in parts_of(given, checkpoint, directory):
            found[part] = value
            print(f"{part}: {json.dumps(value)[:2000]}", file=sys.stderr, flush=True)
            if given.out:
                given.out.write_text(json.dumps(found, indent=1))
    finish("cluster_run", found, given.save, lambda: installed("torch", "ray", "sglang", "megatron-core"), given.size)


if __name__ == "__main__":
    main()
