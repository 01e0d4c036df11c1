"""The losses of supervised and preference training against TRL's: same checkpoint, data, order and optimizer, step by step.

Run: ``python benchmarks/training/trl_offline.py --trl-python PYTHON --save`` (a minute or two; needs ``plugins/offline``, and TRL 1.16 with
datasets in PYTHON's installation, or their folder as ``--trl-path``). A small random Llama in float32 on the CPU trains for twenty steps of
eight rows: SFT on prompts with completions, SFT on conversations of one to three answers, DPO, IPO, KTO, and reward models, without and with
margins and centered scores. Each side runs its own training loop in its own process. The last line is one JSON object: for each case both lists
of losses, their largest relative difference, and the median seconds per step of each side, which on so small a model are overhead and no measure
of speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, finish, installed, options

STEPS, ROWS, LR, BETA, CENTER = 20, 8, 1e-3, 0.1, 0.05
CASES = ("sft text", "sft messages", "dpo", "ipo", "kto", "reward_model", "reward_model margins")
#: Marks what the assistant writes, which TRL reads from the template. Rendered text is that of the demo's template.
TEMPLATE = (
    "{%- for message in messages -%}<|start|>{{ message.role }}: {%- if message.role == 'assistant' %} {% generation %}"
    "{{ message.content }}<|end|>{% endgeneration %}{%- else %} {{ message.content }}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start|>assistant: {% endif -%}"
)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--trl-python", default=sys.executable, help="Python that has TRL")
    parser.add_argument("--trl-path", default="", help="folder with TRL and datasets, added to its path")
    parser.add_argument("--worker", choices=("miles", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        found = {"miles": train_with_miles, "trl": train_with_trl}[given.worker](given.case, given.directory)
        (given.directory / f"{given.worker}.json").write_text(json.dumps(found), encoding="utf-8")
        return
    rows: dict[str, Any] = {}
    versions: dict[str, str] = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            make_inputs(case, directory)
            sides = {side: run_side(side, case, directory, given) for side in ("miles", "trl")}
        ours, theirs = (sides[side]["losses"] for side in ("miles", "trl"))
        versions |= sides["miles"]["versions"] | sides["trl"]["versions"]
        rows[case] = {
            "miles": [round(loss, 7) for loss in ours],
            "trl": [round(loss, 7) for loss in theirs],
            "largest_relative_difference": max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)),
            "seconds_per_step": {side: round(statistics.median(found["seconds"]), 4) for side, found in sides.items()},
        }
        print(f"{case:<20} {rows[case]['largest_relative_difference']:.1e}", file=sys.stderr)
    result = {"steps": STEPS, "rows_per_step": ROWS, "lr": LR, "beta": BETA, "center": CENTER, "cases": rows}
    finish(Path(__file__).stem, result, given.save, lambda: versions)


def run_side(side: str, case: str, directory: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run one side in a process of its own, and return what it found."""
    paths = [str(ROOT), given.trl_path if side == "trl" else "", os.environ.get("PYTHONPATH", "")]
    python = given.trl_python if side == "trl" else sys.executable
    words = [python, __file__, "--worker", side, "--case", case, "--directory", str(directory)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": str(given.threads),
    }
    subprocess.run(words, check=True, env=environment, stdout=sys.stderr)
    found: dict[str, Any] = json.loads((directory / f"{side}.json").read_text(encoding="utf-8"))
    return found


def make_inputs(case: str, directory: Path) -> None:
    """Write the model and the rows of a case, enough for all steps without a second epoch."""
    from miles_testing.toy import toy_files

    shutil.copytree(toy_files("llama", max_position_embeddings=512) / "model", directory / "model")
    if case.startswith("reward_model"):
        make_classifier(directory / "model")
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "ran", "to", "his", "big", "red", "dog"]

    def text(most: int) -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, most)))

    def say(role: str, most: int) -> dict[str, str]:
        return {"role": role, "content": text(most)}

    rows: list[dict[str, Any]] = []
    for _ in range(STEPS * ROWS):
        if case == "sft text":
            rows.append({"prompt": text(6), "completion": " " + text(8)})
        elif case == "sft messages":
            turns = [[say("user", 5), say("assistant", 7)] for _ in range(draw.randint(1, 3))]
            rows.append({"messages": [message for turn in turns for message in turn]})
        elif case == "kto":
            rows.append({"prompt": [say("user", 5)], "completion": [say("assistant", 7)], "label": draw.random() < 0.6})
        else:
            rejected = say("assistant", 7)
            rejected["content"] += " no"
            rows.append({"prompt": [say("user", 5)], "chosen": [say("assistant", 7)], "rejected": [rejected]})
            if case == "reward_model margins":
                rows[-1]["margin"] = draw.random()
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_classifier(model: Path) -> None:
    """Replace a causal language model by a classifier with its layers and a random score head."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype="float32").save_pretrained(model)


def train_with_miles(case: str, directory: Path) -> dict[str, Any]:
    """Train with ``miles train``."""
    from miles_core.cli import train
    from miles_core.observe.metrics import read

    name = case.split()[0]
    flags = f"""--plugins offline --advantage-estimator {name} --hf-checkpoint {directory}/model --prompt-data {directory}/rows.jsonl
        --rollout-batch-size {ROWS} --num-rollout {STEPS} --lr {LR} --weight-decay 0 --adam-beta2 0.999 --clip-grad 1.0
        --device cpu --dtype float32 --save {directory}/run --log-level warning"""
    more = {
        "sft": "--loss-aggregation token_mean",
        "reward_model": f"--center-rewards-coefficient {CENTER}" if case == "reward_model margins" else "",
    }
    train.run([*flags.split(), *more.get(name, f"--kl-coef {BETA}").split()])
    records = [record for record in read(directory / "run" / "metrics.jsonl") if "train/loss" in record]
    return {
        "losses": [record["train/loss"] for record in records],
        "seconds": [record["time/step"] for record in records],
        "versions": installed("miles-core", "torch", "transformers"),
    }


def make_config(case: str, directory: Path) -> Any:
    """Make the configuration of TRL's trainer of the case."""
    from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig

    settings: dict[str, Any] = {
        "output_dir": str(directory / "trl"),
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "adam_beta2": 0.999,
        "max_grad_norm": 1.0,
        "max_length": None,
        "train_sampling_strategy": "sequential",
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"},
    }
    if case.startswith("sft"):
        return SFTConfig(**settings, assistant_only_loss=case == "sft messages")
    if case == "kto":
        return KTOConfig(**settings, beta=BETA)
    if case.startswith("reward_model"):
        return RewardConfig(**settings, center_rewards_coefficient=CENTER if case == "reward_model margins" else None)
    return DPOConfig(**settings, beta=BETA, loss_type=["sigmoid" if case == "dpo" else "ipo"])


def train_with_trl(case: str, directory: Path) -> dict[str, Any]:
    """Train with TRL's trainer of the case, recording the loss of each step before it is rounded."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer

    losses: list[float] = []
    times = [time.perf_counter()]
    owners: dict[str, Any] = {"sft": SFTTrainer, "kto": KTOTrainer, "reward_model": RewardTrainer}
    owner = owners.get(case.split()[0], DPOTrainer)
    inner = owner.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        found = inner(*args, **kwargs)
        losses.append((found[0] if isinstance(found, tuple) else found).item())
        times.append(time.perf_counter())
        return found

    owner.compute_loss = compute_loss  # not a subclass: datasets pickles the trainer's class
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.chat_template = TEMPLATE
    rows = Dataset.from_json(str(directory / "rows.jsonl"), cache_dir=str(directory / "cache"))
    model = str(directory / "model")
    owner(model=model, args=make_config(case, directory), train_dataset=rows, processing_class=tokenizer).train()
    seconds = [after - before for before, after in itertools.pairwise(times[1:])]
    return {"losses": losses, "seconds": seconds, "versions": installed("trl", "transformers")}


if __name__ == "__main__":
    main()
