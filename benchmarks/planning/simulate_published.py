"""``miles simulate`` against published pairs of synchronous and asynchronous runs, and its decode speed against published latencies.

NeMo-RL's rows are read from ``recipes.json``; the first row of a family fits the seconds of training per token, which are not published,
and the others follow from it and the bubbles and padding of their pipelines. The mean length is published.

No distribution of lengths is published: it is log-normal with sigma 1, cut at the published limit (NeMo-RL: of prompt and response).

verl's pages give no lengths, and they differ between its runs. The mean of a row is what its trainer processes in the published seconds of
its updates at the best efficiency that verl publishes for this GPU. The seconds of training are the published ones, so that these rows
test the schedule and the engines alone; nothing is fitted.

Clusters and batches with more than 1,000 samples per step are simulated at the given fraction.

Run: ``python benchmarks/planning/simulate_published.py --save`` (one minute on one core).
"""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measure import finish, installed, options
from miles_planner.simulation.hardware import find_gpu
from miles_planner.simulation.lengths import LogNormal
from miles_planner.simulation.model_shape import shape_of
from miles_planner.simulation.simulation import Simulated, simulate
from miles_planner.simulation.speed import Roofline

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


#: Tokens of a prompt. NeMo-RL's tables: tokens per second and GPU times seconds times GPUs, per sample, less the mean response.
PROMPT = 110
#: Best training efficiency that verl publishes for H20 (of its 148 TFLOP/s): Qwen3-30B-A3B on 8 GPUs.
MFU = 0.40
#: Seconds of a weight sync: verl's page on its checkpoint engine (7B), miles on H100 (30B, 235B), NeMo-RL (DeepSeek-V3), all over NCCL.
SYNC = {"qwen2.5-7b": 5.5, "qwen3-30b-a3b": 2.7, "qwen3-235b-a22b": 10.8, "deepseek-v3": 14.2}
#: Seconds of one of the four moves between host and GPU of a step on shared GPUs: verl's step less generation, log-probs, update and sync;
#: NeMo-RL's pull request 3294 (30B, 235B on B200: total refit less transfer and update). DeepSeek-V3's are unpublished: those of 235B.
SWITCH = {"qwen2.5-7b": 1.4, "qwen3-30b-a3b": 1.9, "qwen3-235b-a22b": 5.5, "deepseek-v3": 5.5}


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
        prompts, samples, mean, longest: the batch, the mean response and the limit of a response.
        schedule: its flags.
        pipeline: pipeline stages and data-parallel replicas of the trainer.
        optimizer_batch: samples of an optimizer step.
        memory: fraction of a GPU's memory for the engine.
        running: requests that an engine decodes at most.
        train: seconds of training per step, if published.
        rollout: seconds of generation per step, if published; for comparison.
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
    mean: float
    longest: int
    schedule: str
    pipeline: tuple[int, int]
    optimizer_batch: int
    memory: float
    running: int
    train: float | None = None
    rollout: float | None = None
    fraction: float = 1.0
    source: str = NEMO

    @property
    def tokens(self) -> float:
        """Tokens of a step, with prompts."""
        return self.prompts * self.samples * (self.mean + PROMPT)

    @property
    def padding(self) -> float:
        """Seconds of training over those without bubbles: p - 1 empty passes (Narayanan et al., arXiv 2104.04473, section 2.2), and replicas
        that wait for the one with a micro-batch more. A micro-batch is packed up to the limit of a sequence."""
        if self.train is not None:
            return 1.0
        stages, replicas = self.pipeline
        packed = self.optimizer_batch * (self.mean + PROMPT) / (self.longest + PROMPT) / replicas
        return (math.ceil(packed) + stages - 1) / packed


def _verl(gpus: int, sync: tuple[float, float, float, float], separate: tuple[float, float]) -> tuple[Row, Row]:
    """A pair of verl's table: 512 prompts x 16 samples, at most 28k tokens, Qwen2.5-Math-7B on H20.

    Args:
        sync: seconds of the synchronous step, its generation, its log-probs and its updates.
        separate: seconds of the asynchronous step and its updates.
    """
    half = gpus // 2
    # its rollouter sends 16 prompts x 16 samples to an engine at once; partial rollout, staleness threshold 0.5
    row = Row(
        *(f"verl 7B {gpus} H20", "shared, sync", sync[0], "qwen2.5-7b", "H20", 1, (gpus, gpus), True),
        *(512, 16, _processed(sync[3] * gpus), 28672, "", (1, gpus), 512, 0.8, 1024, sync[2] + sync[3], sync[1], 1 / 8, VERL),
    )  # fmt: skip
    split: dict[str, Any] = {"split": (half, half), "shared": False, "schedule": _async(1), "running": 256}
    changed = {**split, "mean": _processed(separate[1] * half), "train": separate[1], "rollout": None}
    return row, replace(row, name=f"{half}+{half}, async", seconds=separate[0], **changed)


def _processed(gpu_seconds: float) -> float:
    """Mean response that verl's trainer updates in these seconds of H20, times 512 x 16 samples."""
    return gpu_seconds * find_gpu("H20").flops * MFU / (6 * shape_of(MODELS["qwen2.5-7b"]).active) / (512 * 16) - PROMPT


def _async(lag: int) -> str:
    """Flags of continuous generation whose requests keep their cache when weights change."""
    return f"--schedule async --max-weight-staleness {lag} --stale-samples train --pause-generation-mode in_place"


def _nemo(family: str, name: str, recipe: str, fraction: float = 1.0, **changed: Any) -> Row:
    """A row of NeMo-RL's table, from ``recipes.json``; its asynchronous recipes update weights in flight."""
    found = next(r for r in RECIPES if r["id"] == recipe) | changed
    return Row(
        *(family, name, found["published"]["step_s"], found["config"], found["gpu"], found["engine_tp"]),
        *((found["rollout_gpus"], found["trainer_gpus"]), found["placement"] == "colocated"),
        *(found["prompts"], found["samples_per_prompt"], found["response_mean"], found["max_sequence"] - PROMPT),
        *(_async(found["max_lag_steps"]) if found["max_lag_steps"] else "", (found["pp"], found["dp"])),
        *(found["global_batch"], found["mem_fraction"], 1024),
        fraction=fraction,
    )  # fmt: skip


RECIPES = json.loads((Path(__file__).parent / "recipes.json").read_text(encoding="utf-8"))
#: Rows of the table that ``recipes.json`` leaves out, as changes of a neighbour. The table is of version 0.6, whose recipes (69c7ca117) give
#: separate engines 0.8 of the memory; ``recipes.json`` is of a later commit.
_SHARED_30B: dict[str, Any] = {
    **{"placement": "colocated", "max_lag_steps": 0, "trainer_gpus": 32, "rollout_gpus": 32, "pp": 1, "dp": 32},
    **{"response_mean": 3203, "published": {"step_s": 192}},
}
_SHARED_235B: dict[str, Any] = {
    **{"trainer_gpus": 256, "rollout_gpus": 256, "dp": 8, "response_mean": 5713, "published": {"step_s": 312}},
}
#: Generation of 30B on 16 shared GB200, 69.17 s (NeMo-RL's pull request 3461, with the Triton backend); mean length from the table of version 0.6.
GENERATION_SECONDS = 69.17
_GB200_30B: dict[str, Any] = {
    **{"gpu": "GB200", "engine_tp": 1, "trainer_gpus": 16, "rollout_gpus": 16, "dp": 16, "response_mean": 3199},
    **{"mem_fraction": 0.6, "published": {"step_s": 182.124}},
}
ROWS = (
    *_verl(32, (790.10, 357.41, 107.71, 313.81), (294.77, 269.80)),
    *_verl(64, (365.28, 150.72, 70.26, 133.41), (189.26, 156.98)),
    *_verl(128, (356.30, 177.85, 53.92, 113.81), (150.63, 113.16)),
    _nemo("NeMo DSV3", "256 shared, sync", "nemo-dsv3-256"),
    _nemo("NeMo DSV3", "512 shared, sync", "nemo-dsv3-512"),
    _nemo("NeMo DSV3", "256+256, 1-off", "nemo-dsv3-512-1off"),
    _nemo("NeMo 235B", "128 shared, sync", "nemo-qwen3-235b-128"),
    _nemo("NeMo 235B", "256 shared, sync", "nemo-qwen3-235b-128", **_SHARED_235B),
    _nemo("NeMo 235B", "128+128, 1-off", "nemo-qwen3-235b-256-1off", mem_fraction=0.8),
    _nemo("NeMo 30B", "32 shared, sync", "nemo-qwen3-30b-32-1off", 0.25, **_SHARED_30B),
    _nemo("NeMo 30B", "16+16, 1-off", "nemo-qwen3-30b-32-1off", 0.25, mem_fraction=0.8),
    _nemo("NeMo 30B", "64+128, 8-off", "nemo-qwen3-30b-192-8off", 0.25),
)

GENERATION = _nemo("NeMo 30B", "16 GB200 shared, sync", "nemo-qwen3-30b-32-1off", **_SHARED_30B | _GB200_30B)

#: Published decode speeds: model, GPU, GPUs of the engine, bytes per parameter, batch, context of a request -> seconds of a step.
LATENCIES = (
    ("qwen3-235b-a22b, 1 request (gist BenHamm, SGLang 0.5.8)", "qwen3-235b-a22b", "B200", 8, 2, 1, 1000, 6.7e-3),
    ("27B dense, 11.5 running (miles documentation)", "27b", "H200", 1, 2, 11.5, 4000, 11.5 / 620),
    ("27B dense, 39 running (miles documentation)", "27b", "H200", 1, 2, 39, 4000, 39 / 1855),
)
#: Standard deviation of the logarithm of lengths, where it is not fitted.
SIGMA = 1.0


def words(row: Row, files: Path, gpu_seconds: float, steps: int = 4) -> list[str]:
    """The flags of one row.

    Args:
        gpu_seconds: seconds of training per token times GPUs, without bubbles.
    """
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
        "--lengths": f"lognormal:{median_of(row.mean, row.longest)},{SIGMA}",
        "--prompt-lengths": f"constant:{PROMPT}",
        "--num-rollout": steps + (10 if "staleness 8" in row.schedule else 2),
        "--train-seconds-per-token": 0.0 if row.train is not None else gpu_seconds * row.padding / trainer,
        "--train-seconds-per-step": row.train or 0.0,
        "--switch-seconds": SWITCH[row.model],
        "--sync-seconds": SYNC[row.model],
        "--max-running-requests": row.running,
        "--engine-memory": row.memory,
    }
    flags = [str(word) for pair in given.items() for word in pair]
    return [*flags, *row.schedule.split(), *(["--colocate"] if row.shared else [])]


def median_of(mean: float, longest: int) -> float:
    """The median of a log-normal that is cut at ``longest`` and has this mean, by bisection of its logarithm."""
    low, high = 1.0, 1000.0 * longest
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mean_of(middle, longest) < mean else (low, middle)
    return math.sqrt(low * high)


def mean_of(median: float, longest: int) -> float:
    """The mean of a log-normal that is cut at ``longest``."""
    lengths = LogNormal(median, SIGMA)
    return sum(min(longest, lengths.quantile((i + 0.5) / 2000)) for i in range(2000)) / 2000


def training_left(row: Row, files: Path) -> float:
    """Seconds of training per token times GPUs that the simulated rollout leaves of a published step."""
    rest = row.seconds - simulate(words(row, files, 0.0)).summary()["seconds_per_step"]
    return max(rest, 0.0) / row.tokens / row.padding * row.split[1]


def predict(files: Path) -> list[dict[str, Any]]:
    """Simulate all rows; the first of a family without published training fits it, the others are predictions."""
    found: list[dict[str, Any]] = []
    families: dict[str, float] = {}
    for row in ROWS:
        fits = row.train is None and row.family not in families
        if fits:
            families[row.family] = training_left(row, files)
        ended = simulate(words(row, files, families.get(row.family, 0.0)))
        found.append(_report(row, "fitted" if fits else "predicted", ended))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def _report(row: Row, role: str, ended: Simulated) -> dict[str, Any]:
    """One row of the result: the published step, the simulated one, and what both imply."""
    summary, tokens = ended.summary(), row.prompts * row.samples * row.mean
    simulated = summary["seconds_per_step"]
    return {
        "family": row.family,
        "row": row.name,
        "role": role,
        "published": row.seconds,
        "simulated": round(simulated, 1),
        "error": round(simulated / row.seconds - 1, 3),
        "engine_busy": round(summary["engine_busy"], 2),
        "trainer_busy": round(summary["trainer_busy"], 2),
        "training_seconds": round(summary["trainer_busy"] * simulated, 1),
        **({"published_rollout": row.rollout, "rollout": round(_rollout(row, ended), 1)} if row.rollout else {}),
        "padding": round(row.padding, 2),
        "running": round(summary["running"], 1),
        "published_tokens_s_per_engine_gpu": round(tokens / row.seconds / row.split[0]),
        "simulated_tokens_s_per_engine_gpu": round(tokens / simulated / row.split[0]),
        "mean_length": round(row.mean),
        "median_length": round(median_of(row.mean, row.longest)),
        "wall_seconds": round(ended.wall, 1),
        "source": row.source,
    }


def _rollout(row: Row, ended: Simulated) -> float:
    """Seconds of generation per step of a synchronous simulation on shared GPUs: without training, sync and four switches."""
    summary = ended.summary()
    return summary["seconds_per_step"] * (1 - summary["trainer_busy"]) - SYNC[row.model] - 4 * SWITCH[row.model]


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
        roofline = Roofline(shapes[model], find_gpu(gpu), gpus, nbytes)
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


def generation(files: Path) -> dict[str, Any]:
    """The one generation of a synchronous step that NeMo-RL publishes, next to the simulated one."""
    seconds = _rollout(GENERATION, simulate(words(GENERATION, files, 0.0)))
    return {
        "row": GENERATION.name,
        "published": GENERATION_SECONDS,
        "simulated": round(seconds, 1),
        "error": round(seconds / GENERATION_SECONDS - 1, 3),
    }


def main() -> None:
    chosen = options(__doc__).parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        rows, alone = predict(Path(temporary)), generation(Path(temporary))
    result = {"rows": rows, "generation": alone, "speedups": speedups(rows), "decode": latencies(), "sigma": SIGMA}
    finish(Path(__file__).stem, result, chosen.save, lambda: installed("torch"))


if __name__ == "__main__":
    main()
