"""Does a student come closer to its teacher, and does its teacher make it solve the task?

Run: ``python benchmarks/distillation.py --threads 2 --save`` (some minutes). The demo's task. For every seed the teacher is the demo's
model after a long supervised warm start, and the student a smaller model (one layer, half the width) after a short one. From there, with
the same number of samples in each step: rewards alone, the teacher alone (sampled tokens, and its top 16), and rewards and teacher
together. The last line of the output is one JSON object: held-out accuracy before and after and the divergence from the teacher in the
first and last fifth of the steps, with 95 % intervals over seeds.
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
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--teacher", type=int, default=800, help="supervised steps of the teacher")
    parser.add_argument("--student", type=int, default=100, help="supervised steps of the student")
    chosen = parser.parse_args()
    import torch

    torch.set_num_threads(chosen.threads)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in MODES}
    for seed in range(chosen.seeds):
        with tempfile.TemporaryDirectory() as directory:
            prepare(Path(directory), seed, chosen.teacher, chosen.student)
            for name, flags in MODES.items():
                runs[name].append(learn(Path(directory), name, flags, seed, chosen.steps))
                print(f"seed {seed}  {name:<24}", runs[name][-1], file=sys.stderr, flush=True)
    settings = {"seeds": chosen.seeds, "steps": chosen.steps, "teacher": chosen.teacher, "student": chosen.student}
    result = {**settings, "modes": {name: {"options": MODES[name], **summary(found)} for name, found in runs.items()}}
    versions = ("miles-core", "miles-plugin-distillation", "torch", "transformers")
    finish(Path(__file__).stem, result, chosen.save, lambda: installed(*versions))


def prepare(directory: Path, seed: int, teacher: int, student: int) -> None:
    """Write the data, the teacher, the smaller student, and the configuration file with both."""
    from miles_tools.demo.inputs import make_inputs
    from miles_tools.demo.model import Size, make_checkpoint

    make_inputs(directory, seed)
    make_checkpoint(directory / "small", seed + 100, Size(hidden=32, layers=1, heads=2, expert_hidden=32))
    for name, model, steps in (("teacher", "model", teacher), ("student", "small", student)):
        flags = ["--hf-checkpoint", str(directory / model), "--sft-data", str(directory / "data/demonstrations.jsonl")]
        flags += ["--sft-steps", str(steps), "--num-rollout", "0", "--export-hf", str(directory / name)]
        train(directory, f"start of {name}", flags, seed)


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
