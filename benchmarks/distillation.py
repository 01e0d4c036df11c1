"""Does a student come closer to its teacher, and does its teacher make it solve the task?

Run: ``python benchmarks/distillation.py --threads 2 --save`` (some minutes). The demo's task. For every seed the teacher is the demo's
model after a supervised warm start and reinforcement learning, and the student a smaller model (half of the experts) after a warm start
alone. From there, with the same number of samples in each step: rewards alone, the teacher alone (sampled tokens, and its top 16), and
rewards and teacher together. The last line of the output is one JSON object: held-out accuracy before and after and the divergence from the
teacher in the first and last fifth of the steps, with 95 % intervals over seeds.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from formats_in_the_loop import interval, train
from measure import finish, installed, options

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
    chosen = parser.parse_args()
    import torch

    torch.set_num_threads(chosen.threads)
    modes, teachers = {name: flags for name, flags in MODES.items() if chosen.only in name}, []
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in modes}
    for seed in range(chosen.seeds):
        with tempfile.TemporaryDirectory() as directory:
            teachers.append(prepare(Path(directory), seed, chosen.teacher, chosen.warm_start))
            print(f"seed {seed}  accuracy of the teacher {teachers[-1]}", file=sys.stderr, flush=True)
            for name, flags in modes.items():
                runs[name].append(learn(Path(directory), name, flags, seed, chosen.steps))
                print(f"seed {seed}  {name:<24}", runs[name][-1], file=sys.stderr, flush=True)
    settings: dict[str, Any] = {
        "seeds": chosen.seeds,
        "steps": chosen.steps,
        "teacher": chosen.teacher,
        "warm_start": chosen.warm_start,
    }
    settings |= {"accuracy_of_teachers": teachers}
    result = {**settings, "modes": {name: {"options": MODES[name], **summary(found)} for name, found in runs.items()}}
    versions = ("miles-core", "miles-plugin-distillation", "torch", "transformers")
    finish(Path(__file__).stem, result, chosen.save, lambda: installed(*versions))


def prepare(directory: Path, seed: int, teacher: int, warm: int) -> float:
    """Write the data, the teacher and the smaller student; returns the teacher's held-out accuracy."""
    from miles_tools.demo.inputs import make_inputs
    from miles_tools.demo.model import Size, make_checkpoint

    make_inputs(directory, seed)
    make_checkpoint(directory / "small", seed + 100, Size(experts=4))
    found = {}
    for name, model, steps in (("teacher", "model", teacher), ("student", "small", 0)):
        flags = ["--hf-checkpoint", str(directory / model), "--sft-data", str(directory / "data/demonstrations.jsonl")]
        flags += ["--sft-steps", str(warm), "--num-rollout", str(steps), "--export-hf", str(directory / name)]
        found[name] = train(directory, f"start of {name}", flags, seed)
    return round(float(next(m["eval/accuracy"] for m in reversed(found["teacher"]) if "eval/accuracy" in m)), 4)


def learn(directory: Path, name: str, flags: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: held-out accuracy at its start and end, and the divergence in its first and last fifth."""
    from miles_tools.demo.inputs import CONFIG

    policies = f"\npolicies: {{student: {{}}, teacher: {{role: frozen, hf_checkpoint: '{directory / 'teacher'}'}}}}\n"
    file = directory / "with_teacher.yaml"
    file.write_text(CONFIG.read_text(encoding="utf-8") + policies, encoding="utf-8")
    more = ["--config", str(file), "--hf-checkpoint", str(directory / "student"), "--num-rollout", str(steps)]
    more += ["--eval-interval", str(steps), "--n-samples-per-eval-prompt", "4", *flags.split()]
    metrics = train(directory, name.replace(",", ""), more, seed)
    accuracy = [m["eval/accuracy"] for m in metrics if "eval/accuracy" in m]
    gaps = [m["distillation/reverse_kl"] for m in metrics if "distillation/reverse_kl" in m]
    fifth = max(len(gaps) // 5, 1)
    return {
        "accuracy": [round(accuracy[0], 4), round(accuracy[-1], 4)],
        "reverse_kl": [round(statistics.mean(part), 4) for part in (gaps[:fifth], gaps[-fifth:])],
        "seconds": round(statistics.median(m["time/step"] for m in metrics if "train/loss" in m), 4),
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means and half-widths of 95 % intervals over seeds."""
    found: dict[str, Any] = {"seconds": round(statistics.mean(r["seconds"] for r in runs), 3)}
    for name in ("accuracy", "reverse_kl"):
        for when, at in (("before", 0), ("after", 1)):
            values = [run[name][at] for run in runs]
            mean, width = interval(values) if len(values) > 1 else (values[0], None)
            found[f"{name}_{when}"] = [round(mean, 4), None if width is None else round(width, 4)]
    return found


if __name__ == "__main__":
    main()
