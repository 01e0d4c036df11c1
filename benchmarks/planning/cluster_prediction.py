"""What the plan and ``miles simulate`` predict for the runs of ``cluster_run.py``, before and after them.

Without a run, response lengths are those that the runs would draw: all as long as the limit (a random model hardly ever ends by itself),
or long-tailed ones with ``--separate``. After a run, ``cluster_run.py`` calls ``predict`` and ``simulate`` with the lengths that it saved.
No GPU is needed::

    python benchmarks/planning/cluster_prediction.py --save
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from benchmarks.planning.cluster_options import flags_of, make_config, run_options

#: Schedule -> steps by which generation may run ahead of training.
LAG = {"sync": 0, "ahead": 1, "async": 2}


def long_tailed_lengths(longest: int, count: int) -> list[int]:
    """Return the lengths of the first samples as ``LONG_TAILED`` chooses them."""
    found = (math.exp(math.log(longest / 6) + random.Random(index).gauss(0, 1.0)) for index in range(count))
    return [max(4, min(longest, int(length))) for length in found]


def predict(given: argparse.Namespace, flags: list[str], mean: float) -> dict[str, Any]:
    """Return the plan's memory and the estimates of a step.

    Args:
        flags: options of the run.
        mean: mean length of its responses.
    """
    from miles_core.config.load import load
    from miles_core.plugin.check import check
    from miles_core.plugin.model_config import model_config
    from miles_core.run.prepare import catalogue_for, facts_for, requested_plugins
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
    result = check(requested_plugins(config, facts, catalogue), catalogue, facts)
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


def parameters_of_config(c: Any) -> int:
    """Return the number of parameters of a Qwen3 mixture of experts."""
    hidden = c.hidden_size
    attention = hidden * c.head_dim * 2 * (c.num_attention_heads + c.num_key_value_heads) + 2 * c.head_dim
    experts = c.num_experts * (3 * c.moe_intermediate_size + 1) * hidden
    layers = c.num_hidden_layers * (attention + experts + 2 * hidden)
    return int(layers + 2 * c.vocab_size * hidden + hidden)


def main() -> None:
    parser = run_options(options(__doc__))
    given = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, separate, schedule, tokens in (
        ("colocated", False, "sync", given.tokens),
        ("sync", True, "sync", given.long_tokens),
        ("ahead", True, "ahead", given.long_tokens),
        ("async", True, "async", given.long_tokens),
    ):
        one = argparse.Namespace(**{**vars(given), "separate": separate, "schedule": schedule, "tokens": tokens})
        with tempfile.TemporaryDirectory() as temporary:
            directory, checkpoint = Path(temporary), Path(temporary) / "model"
            config = make_config(given.size)
            config.save_pretrained(checkpoint)
            lengths = long_tailed_lengths(tokens, 4096) if separate else [tokens]
            form = f"lognormal:{tokens / 6:g},1.0" if separate else f"constant:{tokens}"
            predicted = predict(one, flags_of(one, checkpoint, directory), statistics.fmean(lengths))
            simulated = simulate(one, checkpoint, form, predicted["seconds"], 20)
            rows[name] = {"lengths": form, "predicted": predicted, "simulated": simulated}
        print(f"{name:10} {json.dumps(rows[name])}", file=sys.stderr, flush=True)
    result = {
        "size": given.size,
        "parameters": parameters_of_config(make_config(given.size)),
        "gpu": given.gpu,
        "runs": rows,
    }
    finish("cluster_prediction", result, given.save, lambda: installed("torch"), given.size)


if __name__ == "__main__":
    main()
