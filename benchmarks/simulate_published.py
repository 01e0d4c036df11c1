"""``miles simulate`` against published pairs of synchronous and asynchronous runs, and its decode speed against published latencies.

Every family of rows has one synchronous row that fits what is not published: the median length (verl, whose page gives the seconds of
generation) or the seconds of training per token (NeMo-RL, verl v1, whose pages give the mean length). All other rows are predictions.
verl's pages also give the trainer's seconds of the asynchronous rows, which its smaller trainer does not explain by itself; these rows
take them as given, so that they test the schedule and the engines alone. Lengths are log-normal with sigma 1 (unpublished), cut at the
published maximum. Clusters and batches with more than 1,000 samples per step are simulated at the given fraction.

Run: ``python benchmarks/simulate_published.py --save`` (two minutes on one core).
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import finish, installed, options

from miles_simulation.hardware import GPUS
from miles_simulation.model_shape import shape_of
from miles_simulation.simulation import simulate
from miles_simulation.speed import Roofline

_QWEN = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
#: Sizes of the models, from their config.json.
MODELS: dict[str, dict[str, int]] = {
    "qwen2.5-7b": {
        **{"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"intermediate_size": 18944, "vocab_size": 152064},
    },
    "qwen3-30b-a3b": {
        **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "intermediate_size": 6144},
        **{"moe_intermediate_size": 768, **_EXPERTS, **_QWEN},
    },
    "qwen3-235b-a22b": {
        **{"hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "intermediate_size": 12288},
        **{"moe_intermediate_size": 1536, **_EXPERTS, **_QWEN},
    },
    "deepseek-v3": {
        **{"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "intermediate_size": 18432},
        **{"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        **{"qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 129280},
    },
}

NEMO = "NeMo-RL, performance table of its documentation"
VERL = "verl, page on its fully asynchronous policy"


@dataclass(frozen=True)
class Row:
    """One published row.

    Attributes:
        family: rows that share what the first one fits.
        name: of the row.
        seconds: published, per step.
        model, gpu, engine_size: of the engines.
        split: GPUs of engines and trainer; equal for shared GPUs.
        shared: whether both use the same GPUs.
        prompts, samples, mean, longest: the batch, the mean response (0: unpublished) and the limit.
        schedule: its flags.
        train: seconds of training per step, if published.
        rollout: seconds of generation per step, if published; the first row of its family fits the lengths to it.
        fraction: of the cluster and the batch that is simulated.
        source: where the numbers are from.
    """

    family: str
    name: str
    seconds: float
    model: str
    gpu: str
    engine_size: int
    split: tuple[int, int]
    shared: bool
    prompts: int
    samples: int
    mean: int
    longest: int
    schedule: str = ""
    train: float | None = None
    rollout: float | None = None
    fraction: float = 1.0
    weight_bytes: int = 2
    source: str = NEMO


def _verl(name: str, seconds: float, gpus: int, shared: bool, train: float, rollout: float | None = None) -> Row:
    """A row of verl's table: 512 prompts x 16 samples, at most 28k tokens, Qwen2.5-Math-7B on H20."""
    split = (gpus, gpus) if shared else (gpus // 2, gpus // 2)
    schedule = "" if shared else "--schedule async --max-weight-staleness 1 --stale-samples train"
    sizes = (512, 16, 0, 28672)
    family = f"verl 7B {gpus} H20"
    return Row(
        family, name, seconds, "qwen2.5-7b", "H20", 1, split, shared, *sizes, schedule, train, rollout, 1 / 16, source=VERL
    )  # fmt: skip


ASYNC8 = "--schedule async --max-weight-staleness 8 --stale-samples train"
ROWS = (
    _verl("shared, sync", 790.10, 32, True, 107.71 + 313.81, 357.41),
    _verl("16+16, async", 294.77, 32, False, 269.80),
    _verl("shared, sync", 365.28, 64, True, 70.26 + 133.41, 150.72),
    _verl("32+32, async", 189.26, 64, False, 156.98),
    _verl("shared, sync", 356.30, 128, True, 53.92 + 113.81, 177.85),
    _verl("64+64, async", 150.63, 128, False, 113.16),
    Row("NeMo DSV3", "256 shared, sync", 134, "deepseek-v3", "H100", 32, (256, 256), True, 32, 16, 701, 4096),
    Row("NeMo DSV3", "512 shared, sync", 111, "deepseek-v3", "H100", 32, (512, 512), True, 32, 16, 697, 4096),
    Row("NeMo DSV3", "256+256, 1-off", 64.1, "deepseek-v3", "H100", 32, (256, 256), False, 32, 16, 710, 4096, "--schedule ahead"),
    Row("NeMo 235B", "128 shared, sync", 395, "qwen3-235b-a22b", "H100", 16, (128, 128), True, 16, 32, 5698, 16384),
    Row("NeMo 235B", "256 shared, sync", 312, "qwen3-235b-a22b", "H100", 16, (256, 256), True, 16, 32, 5700, 16384),
    Row("NeMo 235B", "128+128, 1-off", 231, "qwen3-235b-a22b", "H100", 8, (128, 128), False, 16, 32, 5721, 16384, "--schedule ahead"),
    Row("NeMo 30B", "32 shared, sync", 192, "qwen3-30b-a3b", "H100", 2, (32, 32), True, 64, 32, 3200, 16384, fraction=0.25),
    Row("NeMo 30B", "16+16, 1-off", 152, "qwen3-30b-a3b", "H100", 2, (16, 16), False, 64, 32, 3201, 16384, "--schedule ahead", fraction=0.25),
    Row("NeMo 30B", "64+128, 8-off", 34.5, "qwen3-30b-a3b", "H100", 2, (64, 128), False, 64, 32, 3206, 16384, ASYNC8, fraction=0.25),
)  # fmt: skip

#: Published decode speeds: model, GPU, GPUs of the engine, bytes per parameter, batch, context of a request -> seconds of a step.
LATENCIES = (
    ("qwen3-235b-a22b, 1 request (gist BenHamm, SGLang 0.5.8)", "qwen3-235b-a22b", "B200", 8, 2, 1, 1000, 6.7e-3),
    ("27B dense, 11.5 running (miles documentation)", "27b", "H200", 1, 2, 11.5, 4000, 11.5 / 620),
    ("27B dense, 39 running (miles documentation)", "27b", "H200", 1, 2, 39, 4000, 39 / 1855),
)
#: Of a log-normal with sigma 1: the mean is the median times this, if nothing is cut.
SIGMA, MEAN = 1.0, 1.6487


def words(row: Row, files: Path, median: float, per_token: float, steps: int = 4) -> list[str]:
    """The flags of one row."""
    config = files / f"{row.model}.json"
    config.write_text(json.dumps(MODELS[row.model]))
    engines, trainer = (max(row.engine_size, round(gpus * row.fraction)) for gpus in row.split)
    given: dict[str, Any] = {
        "--model-config": config,
        "--gpu": row.gpu,
        "--engine-size": row.engine_size,
        "--engine-gpus": engines,
        "--trainer-gpus": trainer,
        "--rollout-batch-size": max(1, round(row.prompts * row.fraction)),
        "--n-samples-per-prompt": row.samples,
        "--rollout-max-response-len": row.longest,
        "--lengths": f"lognormal:{median},{SIGMA}",
        "--num-rollout": steps + (10 if "8" in row.schedule else 2),
        "--train-seconds-per-token": per_token,
        "--train-seconds-per-step": row.train or 0.0,
        "--switch-seconds": 2,
        "--sync-seconds": 5,
        "--max-running-requests": 512,
        "--engine-weight-bytes": row.weight_bytes,
    }
    flags = [str(word) for pair in given.items() for word in pair]
    return [*flags, *row.schedule.split(), *(["--colocate"] if row.shared else [])]


def fit(target: float, measure: Any, low: float, high: float) -> float:
    """Bisect the logarithm of a parameter until ``measure`` gives the target."""
    for _ in range(6):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if measure(middle) < target else (low, middle)
    return float((low * high) ** 0.5)


def predict(files: Path) -> list[dict[str, Any]]:
    """Simulate all rows; the first of a family fits, the others are predictions."""
    found: list[dict[str, Any]] = []
    median, gpu_seconds = 0.0, 0.0
    seen: set[str] = set()
    for row in ROWS:
        fits = row.family not in seen
        seen.add(row.family)
        if row.mean:
            median = fit(row.mean, lambda m, r=row: _mean(m, r.longest), row.mean / 4, row.mean)
        if fits and row.rollout is not None:
            median = fit(row.rollout, lambda m, r=row: _rollout(simulate(words(r, files, m, 0.0, 1))), 200, 20_000)
        first = simulate(words(row, files, median, 0.0 if row.train is not None else gpu_seconds / row.split[1]))
        summary = first.summary()
        if fits and row.train is None:  # what the rollout does not take is training
            rest = row.seconds - simulate(words(row, files, median, 0.0)).summary()["seconds_per_step"]
            tokens = row.prompts * row.samples * row.fraction * (summary["length_mean"] + 512)
            gpu_seconds = max(rest, 0.0) / tokens * row.split[1]
            summary = simulate(words(row, files, median, gpu_seconds / row.split[1])).summary()
        simulated = summary["seconds_per_step"]
        found.append(
            {
                "family": row.family,
                "row": row.name,
                "role": "fitted" if fits else "predicted",
                "published": row.seconds,
                "simulated": round(simulated, 1),
                "error": round(simulated / row.seconds - 1, 3),
                "engine_busy": round(summary["engine_busy"], 2),
                "trainer_busy": round(summary["trainer_busy"], 2),
                "median_length": round(median),
                "wall_seconds": round(first.wall, 1),
                "source": row.source,
            }
        )
        print(found[-1], file=sys.stderr, flush=True)
    return found


def _mean(median: float, longest: int) -> float:
    from miles_simulation.lengths import LogNormal

    lengths = LogNormal(median, SIGMA)
    return sum(min(longest, lengths.quantile((i + 0.5) / 2000)) for i in range(2000)) / 2000


def _rollout(found: Any) -> float:
    """Seconds of generation per step of a synchronous simulation: engines run between two trainings."""
    busy = found.summary()
    return busy["seconds_per_step"] * (1 - busy["trainer_busy"]) - 5 - 4 * 2


def speedups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The published and the simulated gain of every row over the first of its family."""
    first = {row["family"]: row for row in reversed(rows)}
    return [
        {
            "family": row["family"],
            "row": row["row"],
            "published": round(first[row["family"]]["published"] / row["published"], 2),
            "simulated": round(first[row["family"]]["simulated"] / row["simulated"], 2),
        }
        for row in rows
        if row["role"] == "predicted"
    ]


def latencies() -> list[dict[str, Any]]:
    """Computed decode steps next to published ones."""
    dense = {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 32, "num_key_value_heads": 8}
    shapes = {name: shape_of(config) for name, config in MODELS.items()}
    shapes["27b"] = shape_of({**dense, "head_dim": 128, "intermediate_size": 23000, "vocab_size": 151936})
    found = []
    for name, model, gpu, gpus, nbytes, batch, context, published in LATENCIES:
        roofline = Roofline(shapes[model], GPUS[gpu], gpus, nbytes)
        kv = 0.25 if model == "27b" else 1.0  # one layer of four of this model keeps keys and values
        seconds = roofline.base(round(batch)) + kv * roofline.per_token * batch * context
        error = round(seconds / published - 1, 3)
        found.append(
            {
                "case": name,
                "published_ms": round(1e3 * published, 2),
                "computed_ms": round(1e3 * seconds, 2),
                "error": error,
            }
        )
    return found


def main() -> None:
    chosen = options(__doc__).parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        rows = predict(Path(temporary))
    result = {"rows": rows, "speedups": speedups(rows), "decode": latencies(), "sigma": SIGMA}
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
