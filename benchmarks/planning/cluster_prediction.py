"""What the plan and ``miles simulate`` predict for a run of ``cluster_run.py``, with the response lengths that it saved."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

#: Schedule -> steps by which generation may run ahead of training.
LAG = {"sync": 0, "ahead": 1, "async": 2}


def predict(given: argparse.Namespace, flags: list[str], mean: float) -> dict[str, Any]:
    """Return the plan's memory and the estimates of a step.

    Args:
        flags: options of the run.
        mean: mean length of its responses.
    """
    from miles_core.config.load import load
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

    config = load([*flags, "--device", "cuda"] if given.device == "cpu" else flags)
    catalogue = catalogue_for(config)
    facts = facts_for(config, [f"hardware=1x2x{given.gpu}"])
    result = check(config.requested, catalogue, facts)
    model = model_config(config.model.hf_checkpoint)
    assert model is not None
    cost, rates = model_cost(model), rates_of(given.gpu, 2)
    trainer = trainer_planner("megatron").read(result.facts, model)
    engine = engine_planner("sglang").read(result.facts, model, 1 if given.separate else 2)
    assert cost is not None and trainer is not None and engine is not None
    work = Workload(given.prompts * 8, 64.0, mean, given.tokens, 1, 1, LAG[given.schedule] if given.separate else 0)
    generated = rollout_time(rates, cost, engine, work)
    trained = training_time(rates, cost, trainer, work, not given.separate)
    transport = str(result.facts.value("transport"))
    step = step_time(rates, generated, trained, engine, work, not given.separate, transport)
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


def simulate(
    given: argparse.Namespace, checkpoint: Path, lengths: str, seconds: dict[str, float], steps: int = 6
) -> dict[str, Any]:
    """Return what ``miles simulate`` reports.

    Args:
        lengths: its ``--lengths``.
        seconds: the estimates of ``predict``, which has the moves of the memory and the sync of a model of this size.
        steps: number of steps.
    """
    gpus = ["--trainer-gpus", "1"] if given.separate else ["--trainer-gpus", "2", "--colocate"]
    schedule = ["--schedule", given.schedule] if given.separate else []
    if given.separate and given.schedule == "async":
        schedule += ["--max-weight-staleness", "2", "--stale-samples", "train"]
    command = [
        sys.executable, "-m", "miles_core", "simulate", "--json", "--model-config", str(checkpoint / "config.json"), "--gpu", given.gpu,
        "--engine-gpus", "1" if given.separate else "2", *gpus, "--rollout-batch-size", str(given.prompts),
        "--n-samples-per-prompt", "8", "--rollout-max-response-len", str(given.tokens), "--num-rollout", str(steps),
        "--lengths", lengths, "--prompt-lengths", "constant:64", "--sync-seconds", str(seconds["sync"]),
        "--switch-seconds", str(seconds["moves"] / 4), *schedule,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    try:
        found = dict(json.loads(done.stdout.strip().splitlines()[-1])["simulated"][0])
    except (ValueError, IndexError, KeyError, TypeError):
        return {"failed": done.stderr[-500:], "output": done.stdout[-500:]}
    names = ("seconds_per_step", "tokens_per_second", "engine_busy", "trainer_busy", "staleness_mean", "length_mean")
    return {name: round(found[name], 4) for name in names}


def compare(found: dict[str, Any], samples: int, separate: bool) -> list[dict[str, Any]]:
    """Return a row for each measured number of a run, next to what the plan and the simulator predict for it.

    Args:
        found: parts of the result of ``cluster_run.py``; a step is the median, or with ``separate`` the mean after the first steps.
        samples: samples per step.
        separate: ranks and engines have GPUs of their own.
    """
    medians, plan, simulated = found["medians"], found["predicted"], found["simulated"]
    seconds = plan["seconds"]
    mean = found["steps_per_minute"] if separate else {}
    step = 60 / mean["steps_per_minute"] if separate else medians["time/step"]
    length = mean.get("rollout/length_mean", medians.get("rollout/length_mean", 0.0))
    rows: list[tuple[str, float | None, float | None, float | None]] = [
        ("rollout_seconds", medians.get("time/rollout"), seconds["rollout"], None),
        ("train_seconds", medians.get("time/train"), seconds["train"], None),
        ("moves_seconds", medians.get("time/colocate"), seconds["moves"], None),
        ("sync_seconds", medians.get("time/sync"), seconds["sync"], None),
        ("step_seconds", step, seconds["step"], simulated.get("seconds_per_step")),
        ("tokens_per_second", samples * length / step, None, simulated.get("tokens_per_second")),
        ("staleness", mean.get("rollout/staleness_mean"), None, simulated.get("staleness_mean")),
    ]
    peaks = sorted(found["run"]["peak_gb"], reverse=True)
    planned = sorted((plan["engine_gb"], plan["trainer_gb"]), reverse=True) if separate else [plan["engine_gb"]]
    rows += [
        (f"peak_gb_{n}", peak, gigabytes, None) for n, (peak, gigabytes) in enumerate(zip(peaks, planned, strict=False))
    ]
    return [_row(*row) for row in rows if row[1] is not None]


def _row(name: str, measured: float | None, planned: float | None, simulated: float | None) -> dict[str, Any]:
    values = {"measured": measured, "planned": planned, "simulated": simulated}
    return {"name": name} | {key: round(value, 3) for key, value in values.items() if value is not None}
