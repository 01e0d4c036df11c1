"""Does a student come closer to its teacher, and does its teacher make it solve the task?

Run: ``python benchmarks/learning/distillation.py --threads 2 --save`` (some minutes). The demo's task. For every seed the teacher is the demo's
model after a supervised warm start and reinforcement learning, and the student a smaller model (half of the experts) after a warm start
alone. From there, with the same number of samples in each step: rewards alone, the teacher alone (sampled tokens, and its top 16), and
rewards and teacher together. The last line of the output is one JSON object: held-out accuracy before and after and the divergence from the
teacher in the first and last fifth of the steps, and their changes paired by seed, with 95 % intervals over seeds. With ``--runs DIR`` the results of
finished runs stay in a directory, and a command that was stopped goes on from them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.formats.formats_in_the_loop import train
from benchmarks.learning.seeds import change_of, made_in, mean_of, work_in_processes, workplace
from benchmarks.measure import finish, installed, options

TEACHER, COEF = "--plugins distillation", "--distillation-coef"
ALONE = f"{TEACHER} --advantage-estimator distillation"
MODES = {
    "rewards": f"{TEACHER} {COEF} 0",
    "teacher, sampled token": ALONE,
    "teacher, top 16": f"{ALONE} --distillation-top-k 16",
    "rewards and teacher": f"{TEACHER} {COEF} 0.1 --distillation-top-k 16",
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--teacher", type=int, default=80, help="reinforcement-learning steps of the teacher")
    parser.add_argument("--warm-start", type=int, default=400, help="supervised steps of teacher and student")
    parser.add_argument("--only", default="", help="modes whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--runs", default="", help="directory that keeps the results of finished runs")
    chosen = parser.parse_args()
    modes, seeds = [name for name in MODES if chosen.only in name], range(chosen.seeds)
    versions = ("miles-core", "miles-plugin-distillation", "torch", "transformers")
    with workplace(chosen.runs, lambda: installed(*versions)) as directory:
        shared: dict[str, Any] = {"jobs": chosen.jobs, "threads": chosen.threads, "directory": directory}
        shared |= {"kept": directory if chosen.runs else None}
        sizes = {"teacher": chosen.teacher, "warm": chosen.warm_start}
        starts = [(seed, role) for role in ("teacher", "student") for seed in seeds]
        accuracy = work_in_processes(prepare, starts, **sizes, **shared)
        keys = [(seed, name) for seed in seeds for name in modes]
        found = work_in_processes(learn, keys, steps=chosen.steps, **shared)
        made = made_in(directory)
    teachers = [accuracy[seed, "teacher"] for seed in seeds]
    runs = {name: [found[seed, name] for seed in seeds] for name in modes}
    settings: dict[str, Any] = {
        "seeds": chosen.seeds,
        "steps": chosen.steps,
        "teacher": chosen.teacher,
        "warm_start": chosen.warm_start,
    }
    settings |= {"accuracy_of_teachers": teachers}
    result = {**settings, "modes": {name: {"options": MODES[name], **summary(found)} for name, found in runs.items()}}
    finish(Path(__file__).stem, result | made, chosen.save, lambda: installed(*versions))


def prepare(seed: int, role: str, directory: Path, teacher: int, warm: int) -> float:
    """Write the teacher, or the smaller student, and its data; returns its held-out accuracy."""
    from miles_tools.demo.inputs import make_inputs
    from miles_tools.demo.model import Size, make_checkpoint

    own, steps = directory / f"{seed}-{role}", teacher if role == "teacher" else 0
    make_inputs(own, seed)
    if role == "student":
        make_checkpoint(own / "small", seed + 100, Size(experts=4))
    model = own / ("model" if role == "teacher" else "small")
    flags = ["--hf-checkpoint", str(model), "--sft-data", str(own / "data/demonstrations.jsonl")]
    flags += ["--sft-steps", str(warm), "--num-rollout", str(steps), "--export-hf", str(own / role)]
    found = train(own, f"start of {role}", flags, seed)
    return round(float(next((m["eval/accuracy"] for m in reversed(found) if "eval/accuracy" in m), 0.0)), 4)


def learn(seed: int, name: str, directory: Path, steps: int) -> dict[str, Any]:
    """One run: held-out accuracy at its start and end, and the divergence in its first and last fifth."""
    from miles_tools.demo.inputs import CONFIG

    student, teacher = (directory / f"{seed}-{role}" for role in ("student", "teacher"))
    policies = f"\npolicies: {{student: {{}}, teacher: {{role: frozen, hf_checkpoint: '{teacher / 'teacher'}'}}}}\n"
    file = student / f"{name.replace(',', '').replace(' ', '-')}.yaml"
    file.write_text(CONFIG.read_text(encoding="utf-8") + policies, encoding="utf-8")
    more = ["--config", str(file), "--hf-checkpoint", str(student / "student"), "--num-rollout", str(steps)]
    more += ["--eval-interval", str(max(steps // 4, 1)), "--n-samples-per-eval-prompt", "4", *MODES[name].split()]
    metrics = train(student, name.replace(",", ""), more, seed)
    accuracy = [m["eval/accuracy"] for m in metrics if "eval/accuracy" in m]
    gaps = [m["distillation/reverse_kl"] for m in metrics if "distillation/reverse_kl" in m]
    fifth = max(len(gaps) // 5, 1)
    result = {
        "accuracy": [round(accuracy[0], 4), round(accuracy[-1], 4)],
        "curve": [round(value, 4) for value in accuracy],
        "reverse_kl": [round(statistics.mean(part), 4) for part in (gaps[:fifth], gaps[-fifth:])],
        "seconds": round(statistics.median(m["time/step"] for m in metrics if "train/loss" in m), 4),
    }
    print(f"seed {seed}  {name:<24}", result, file=sys.stderr, flush=True)
    return result


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means and half-widths of 95 % intervals over seeds."""
    found: dict[str, Any] = {"seconds": round(statistics.mean(r["seconds"] for r in runs), 3)}
    found["curve"] = [mean_of(values) for values in zip(*(run["curve"] for run in runs), strict=True)]
    return found | {name: change_of([run[name] for run in runs]) for name in ("accuracy", "reverse_kl")}


if __name__ == "__main__":
    main()
