"""The plan and its estimates, on published recipes of reinforcement learning for language models.

``benchmarks/planning/recipes.json`` has recipes with sources: GPUs, parallel sizes, lengths, and what was published about seconds and memory. Each
recipe's options become flags, and ``miles plan --hardware ...`` checks them; the estimates of ``miles_planner`` are compared with what
was published. ``benchmarks/planning/recipes_unseen.json`` has more of them, which were collected after the efficiencies had been chosen::

    python benchmarks/planning/recipes_plan.py --save
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, finish, options
from miles_core.config.load import load
from miles_core.plugin import Facts
from miles_core.plugin.check import check
from miles_core.plugin.model_config import model_config
from miles_core.run.prepare import catalogue_for, facts_for
from miles_planner.layout import engine_planner, trainer_planner
from miles_planner.model_cost import model_cost
from miles_planner.rates import rates_of
from miles_planner.rollout_time import rollout_time
from miles_planner.step_time import step_time
from miles_planner.training_time import training_time
from miles_planner.workload import Workload

RECIPES = Path(__file__).with_name("recipes.json")
#: Recipes that were collected after the efficiencies had been chosen, so that they test them.
UNSEEN = Path(__file__).with_name("recipes_unseen.json")
CONFIGS = ROOT / "tests" / "published"
#: Models of the recipes that are stored under another name.
STORED = {"glm4.5-355b": "glm-4.5"}
#: Models whose recipes name no configuration.
UNNAMED = {
    "Qwen2.5-Math-7B": "qwen2.5-7b",
    "Qwen3-4B": "qwen3-4b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3-0.6B": "qwen3-0.6b",
}
#: Trainers of other frameworks -> trainer here.
TRAINERS = {"megatron": "megatron", "fsdp2": "embedded"}
#: GPUs per NVLink domain, for GPUs whose domain spans several machines.
NVLINK = {"GB200": 72}
#: Forward passes besides training, for old log-probs and the reference model, in each framework's recipes.
FORWARDS = {"nemo": 2, "verl": 2, "miles": 1}
#: Recipes that count the embedding and the output layer as layers of the pipeline: ROLL's options say so; AReaL divides 94 layers among 12
#: stages in this way (``note`` in recipes.json).
COUNTS_ENDS = ("roll-qwen3-235b-64", "areal-qwen3-235b-80")
#: ``gpu_source`` of recipes that name no GPU.
UNNAMED_GPU = "assumed H100/H200"
#: Tokens of a prompt if a recipe does not determine them.
PROMPT = 150.0


def stage_config(row: dict[str, Any], folder: Path) -> Path | None:
    """Write the ``config.json`` of a recipe's model into a directory; None if the repository has none."""
    name = row["config"] or UNNAMED.get(row["model"])
    source = CONFIGS / f"{STORED.get(name, name)}.json"
    if not name or not source.exists():
        return None
    target = folder / source.stem
    target.mkdir(exist_ok=True)
    (target / "config.json").write_bytes(source.read_bytes())
    return target


def flags(row: dict[str, Any], checkpoint: Path) -> list[str]:
    """Return the command line of a recipe."""
    found = ["--hf-checkpoint", str(checkpoint), *_batch(row), *_placement(row)]
    return found + (_megatron(row) if row["trainer"] == "megatron" else _embedded(row))


def _batch(row: dict[str, Any]) -> list[str]:
    pairs = {
        "--rollout-batch-size": row["prompts"],
        "--n-samples-per-prompt": row["samples_per_prompt"],
        "--global-batch-size": row["global_batch"] if row["prompts"] else 0,
        "--rollout-max-context-len": row["max_sequence"],
        "--rollout-max-prompt-len": row["prompt_max"],
        "--rollout-max-response-len": row["response_max"] or row["max_sequence"],
        "--max-tokens-per-gpu": row["max_tokens_per_gpu"],
        "--micro-batch-size": row["micro_batch"],
    }
    if row["id"].startswith(
        "nemo-"
    ):  # fills micro-batches of this many samples of the longest length with shorter ones
        pairs["--max-tokens-per-gpu"] = pairs.pop("--micro-batch-size") * row["max_sequence"] // row["cp"]
    found = [word for flag, value in pairs.items() if value for word in (flag, str(value))]
    schedule = {0: [], 1: ["--schedule", "ahead"]}.get(row["max_lag_steps"])
    return found + (
        ["--schedule", "async", "--max-weight-staleness", str(row["max_lag_steps"])] if schedule is None else schedule
    )


def _placement(row: dict[str, Any]) -> list[str]:
    each = min(row["gpus_per_node"], row["trainer_gpus"])
    found = [
        "--runtime",
        "ray",
        "--actor-num-nodes",
        str(row["trainer_gpus"] // each),
        "--actor-num-gpus-per-node",
        str(each),
    ]
    if row["placement"] == "colocated":
        found.append("--colocate")
    if not row["engine"]:
        return found
    found += ["--engine", "sglang", "--rollout-num-gpus", str(row["rollout_gpus"])]
    if row["engine_tp"]:
        # vLLM counts data-parallel attention on top of tensor parallelism, SGLang within it
        each = row["engine_tp"] * (row["engine_dp"] if row["engine"] == "vllm" else 1)
        found += ["--rollout-num-gpus-per-engine", str(each)]
    if row["engine_ep"] > 1:
        found += ["--sglang-ep-size", str(row["engine_ep"])]
    if row["engine_dp"] > 1:
        found += ["--sglang-dp-size", str(row["engine_dp"]), "--sglang-enable-dp-attention"]
        found += ["--sglang-moe-dense-tp-size", "1"]  # as slime's and miles' scripts with this attention
    if row["mem_fraction"]:
        # vLLM's share refers to the whole GPU and includes activations, about 8 GB. SGLang's excludes them and refers to free memory: a
        # sleeping trainer keeps 2 GB
        share = row["mem_fraction"]
        if row["engine"] == "vllm":
            kept = 2.0 / row["gpu_memory_gb"] if row["placement"] == "colocated" else 0.0
            share = (share - 8 / row["gpu_memory_gb"]) / (1 - kept)
        found += ["--sglang-mem-fraction-static", f"{share:.2f}"]
    return found + (["--rollout-precision", row["rollout_precision"]] if row["rollout_precision"] != "bf16" else [])


def _megatron(row: dict[str, Any]) -> list[str]:
    sizes = {
        "--tensor-model-parallel-size": row["tp"],
        "--pipeline-model-parallel-size": row["pp"],
        "--context-parallel-size": row["cp"],
        "--expert-model-parallel-size": row["ep"],
        "--virtual-pipeline-model-parallel-size": row["virtual"] if row["virtual"] > 1 else 0,
        "--num-layers-in-first-pipeline-stage": row["first_stage_layers"],
        "--num-layers-in-last-pipeline-stage": row["last_stage_layers"],
        "--expert-tensor-parallel-size": row["etp"] if row["ep"] > 1 else 0,
    }
    found = ["--trainer", "megatron"] + [word for flag, value in sizes.items() if value for word in (flag, str(value))]
    found += ["--sequence-parallel"] * (row["tp"] > 1)
    if row["id"] in COUNTS_ENDS:
        found += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    granularity, _, modules = row["recompute"].partition(":")
    if granularity:
        found += ["--recompute-granularity", granularity]
        found += (
            ["--recompute-modules", modules]
            if modules
            else ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
        )
    if row["optimizer_offload"]:
        found += ["--optimizer-cpu-offload", "--optimizer-offload-fraction", str(row["optimizer_offload"])]
    found += ["--use-precision-aware-optimizer"] * row["precision_aware_optimizer"]
    found += ["--no-grad-reduce-in-fp32"] * (not row["grad_fp32"])
    return found + (["--train-precision", "fp8"] if row["train_precision"].startswith("fp8") else [])


def _embedded(row: dict[str, Any]) -> list[str]:
    return ["--trainer", "embedded", *(["--recompute-activations"] if row["recompute"] else [])]


def hardware(row: dict[str, Any]) -> str:
    """Return the value of ``--hardware``."""
    return f"{row['nodes']}x{row['gpus_per_node']}x{row['gpu']}"


def judge(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Plan a recipe; returns whether it was accepted or why not, and the estimates next to what was published. A recipe that names no GPU
    (``gpu_source``) is planned on H200s if H100s are refused."""
    found = judge_on(row, folder)
    if found["accepted"] is False and row["gpu_source"] == UNNAMED_GPU:
        larger = judge_on(row | {"gpu": "H200", "gpu_memory_gb": 141}, folder)
        if larger["accepted"]:
            return larger | {"gpu": "H200", "refused_on_h100": found["reason"]}
    return found


def judge_on(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Plan a recipe on the GPUs of its row."""
    checkpoint = stage_config(row, folder)
    found: dict[str, Any] = {"id": row["id"]}
    if checkpoint is None:
        return found | {"accepted": None, "reason": f"no config.json of {row['model']} here"}
    if not row["engine"]:
        found["reason"] = "a trainer without an engine: only its memory and speed are compared"
    start = time.perf_counter()
    config = load(flags(row, checkpoint))
    catalogue = catalogue_for(config)
    facts = facts_for(config, [f"hardware={hardware(row)}"])
    result = check(config.requested, catalogue, facts)
    found["accepted"] = not result.problems if row["engine"] else None
    if result.problems and row["engine"]:
        found["reason"] = "; ".join(f"{p.who} {p.verb} {p.needs}: {p.because}" for p in result.problems)
    found["seconds_of_the_plan"] = round(time.perf_counter() - start, 2)
    model = model_config(str(checkpoint))
    assert model is not None
    return found | compare_memory(row, result.facts, model) | compare_time(row, result.facts, model)


def compare_memory(row: dict[str, Any], facts: Facts, model: dict[str, Any]) -> dict[str, Any]:
    """Return the planned peak of the trainer next to the published one, in GB of 1e9 bytes."""
    published = row["published"]
    peak = published.get("peak_gb") or published.get("peak_gib", 0) * 1.073741824
    layout = trainer_planner(TRAINERS[row["trainer"]]).read(facts, model)
    if layout is None:
        return {}
    planned = max(usage.parts.total for usage in layout.estimate()) / 1e9
    found: dict[str, Any] = {"planned_gb": round(planned, 1), "gpu_gb": row["gpu_memory_gb"]}
    return found | ({"published_gb": round(peak, 1), "memory_ratio": round(planned / peak, 3)} if peak else {})


def compare_time(row: dict[str, Any], facts: Facts, model: dict[str, Any]) -> dict[str, Any]:
    """Return the estimated seconds of a step next to the published ones; for a trainer alone, tokens per second."""
    published, cost = row["published"], model_cost(model)
    assert cost is not None
    rates = rates_of(row["gpu"], NVLINK.get(row["gpu"], row["gpus_per_node"]))
    layout = trainer_planner(TRAINERS[row["trainer"]]).read(facts, model)
    if layout is None:
        return {}
    if "tokens_s" in published and not row["engine"]:
        work = Workload(row["trainer_gpus"], 0, row["max_sequence"], row["max_sequence"])
        speed = work.samples * work.tokens / training_time(rates, cost, layout, work).seconds
        ratio = round(published["tokens_s"] / speed, 3)
        return {"tokens_s": round(speed), "published_tokens_s": published["tokens_s"], "trainer_time_ratio": ratio}
    work = workload(row)
    engine = engine_planner("sglang").read(facts, model, row["rollout_gpus"]) if row["engine"] else None
    if "step_s" not in published or work is None or engine is None:
        return {}
    colocated, continuous = row["placement"] == "colocated", row["max_lag_steps"] > 1
    generated = rollout_time(rates, cost, engine, work, continuous)
    trained = training_time(rates, cost, layout, work, colocated)
    step = step_time(rates, generated, trained, engine, work, colocated, "buckets")  # what the published runs resemble
    parts = {"rollout_s": generated.seconds, "train_s": trained.seconds, "sync_s": step.sync}
    return {
        "step_s": round(step.seconds, 1),
        "published_step_s": published["step_s"],
        "time_ratio": round(step.seconds / published["step_s"], 3),
        "parts": {name: round(value, 1) for name, value in parts.items()},
        "published_parts": {name: published[name] for name in parts if name in published},
    }


def workload(row: dict[str, Any]) -> Workload | None:
    """Return the work of a step; None if the recipe does not say how long responses are."""
    if not row["response_mean"]:
        return None
    samples, published = row["prompts"] * row["samples_per_prompt"], row["published"]
    prompt = PROMPT
    if rate := published.get("tokens_s_gpu_all"):  # counts prompts and responses
        prompt = max(rate * row["gpus"] * published["step_s"] / samples - row["response_mean"], 50.0)
    longest = row["response_max"] or int(row["max_sequence"] - prompt)
    steps = max(samples // (row["global_batch"] or samples), 1)
    return Workload(
        samples,
        prompt,
        row["response_mean"],
        longest,
        steps,
        FORWARDS[row["id"].partition("-")[0]],
        row["max_lag_steps"],
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", default="", help="recipes whose id contains this")
    parser.add_argument("--search", action="store_true", help="also measure the processor time of searches")
    given = parser.parse_args()
    judged, unseen = judge_file(RECIPES, given.only), judge_file(UNSEEN, given.only)
    result = {"summary": summarize(judged), "rows": judged, "unseen_summary": summarize(unseen), "unseen": unseen}
    if given.search:
        result["search_seconds"] = measure_search()
    finish("recipes_plan", result, given.save, lambda: {"miles-core": metadata.version("miles-core")})


def judge_file(file: Path, only: str) -> list[dict[str, Any]]:
    """Judge the recipes of a file whose ids contain ``only``."""
    rows = [row for row in json.loads(file.read_text(encoding="utf-8")) if only in row["id"]]
    with tempfile.TemporaryDirectory() as folder:
        judged = [judge(row, Path(folder)) for row in rows]
    for one in judged:
        print(one, file=sys.stderr)
    return judged


def measure_search() -> dict[str, float]:
    """Return the processor seconds of ``miles plan --search``, start included, for large models on 8 to 2,048 GPUs."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("qwen3-235b-a22b", "deepseek-v3", "kimi-k2"):
            target = Path(folder) / name
            target.mkdir()
            (target / "config.json").write_bytes((CONFIGS / f"{name}.json").read_bytes())
            for gpus in (8, 256, 2048):
                command = [sys.executable, "-m", "miles_core", "plan", "--search", "--hardware", f"{gpus}xH200"]
                words = ["--hf-checkpoint", str(target), "--rollout-batch-size", "256", "--n-samples-per-prompt", "16"]
                before = os.times()
                done = subprocess.run(
                    [*command, *words, "--rollout-max-response-len", "16384"], capture_output=True, check=False
                )
                after = os.times()
                assert done.returncode in (0, 2), done.stderr
                used = after.children_user - before.children_user + after.children_system - before.children_system
                found[f"{name}, {gpus} GPUs"] = round(used, 2)
    return found


def summarize(judged: list[dict[str, Any]]) -> dict[str, Any]:
    """Count what was accepted, and how many estimates are within the goals: 20 % of memory, a factor of 1.5 of time."""
    memory = [one["memory_ratio"] for one in judged if "memory_ratio" in one]
    seconds = [one["time_ratio"] for one in judged if "time_ratio" in one]
    alone = [one["trainer_time_ratio"] for one in judged if "trainer_time_ratio" in one]
    return {
        "recipes": len(judged),
        "accepted": sum(one["accepted"] is True for one in judged),
        "refused": sum(one["accepted"] is False for one in judged),
        "not_judged": sum(one["accepted"] is None for one in judged),
        "memory_published": len(memory),
        "memory_within_20_percent": sum(abs(ratio - 1) <= 0.2 for ratio in memory),
        "time_published": len(seconds),
        "time_within_factor_1_5": sum(1 / 1.5 <= ratio <= 1.5 for ratio in seconds),
        "trainers_alone_published": len(alone),
        "trainers_alone_within_factor_1_5": sum(1 / 1.5 <= ratio <= 1.5 for ratio in alone),
    }


if __name__ == "__main__":
    main()
