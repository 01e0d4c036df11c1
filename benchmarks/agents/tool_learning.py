"""A pretrained model learns to use a calculator, and a task of reasoning-gym: held-out accuracy over steps, several seeds.

``calculator``: products of numbers that the model cannot compute; a warm start on a few hundred written calls teaches the format, then GRPO with
``--generate tools``. ``without_tool`` is the same task without the tool, for comparison. ``reasoning_gym``: sums of ``chain_sum`` by the plugin
``environments``; ``curriculum`` is the same data set, whose difficulty follows success. Every run is one ``miles train``. ``--plot`` draws the
curves; with ``--results FILE ...``, those of saved results, and nothing is run. The last line is one JSON object. The packages need not be installed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.measure import finish, options
from benchmarks.scale.checkout import register

TOOLS = '''def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b
'''
REWARD = '''import re

def reward(args, sample):
    """1 for the right number as the last one of the final answer, .1 for any number."""
    found = re.findall(r"-?\\d+", str(sample.metadata.get("answer", sample.response)).replace(",", ""))
    return {"score": 1.0 if found and found[-1] == sample.label else 0.1 if found else 0.0}
'''
COMMON = (
    "--apply-chat-template --lr 1e-5 --rollout-batch-size 64 --n-samples-per-prompt 8 --max-running-requests 512 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 32768 --plugins tis --no-save-rollouts --save-interval 100000"
)
FILES = (
    "--prompt-data {d}/train.jsonl --eval-prompt-data {d}/eval.jsonl --input-key prompt --label-key label "
    "--custom-rm-path {d}/reward.py:reward --reward-key score"
)
SUMS = "reasoning_gym:chain_sum?answer=number&instructions=Answer%20with%20the%20number%20only."
FIXED = "min_terms=2&max_terms=2&min_digits=2&max_digits=2"
HELD_OUT = "--eval-prompts environments --eval-prompt-data sums= --eval-environments-size {size}"
VARIANTS = {
    "calculator": f"{FILES} --sft-data {{d}}/pairs.jsonl --sft-steps {{sft}} --generate tools --tools {{d}}/tools.py --tool-prompt text "
    "--tool-turns 3 --rollout-max-response-len 64",
    "without_tool": f"{FILES} --rollout-max-response-len 16",
    "reasoning_gym": f"--environments {SUMS}&{FIXED} {HELD_OUT} --rollout-max-response-len 16",
    "curriculum": f"--environments {SUMS}&curriculum=true&window=256&up=0.7 --eval-environments {SUMS}&{FIXED} {HELD_OUT} "
    "--rollout-max-response-len 16",
}
#: Metrics of a step that the result keeps, besides the held-out accuracy.
KEPT = (
    "reward/mean",
    "tools/calls",
    "tools/errors",
    "tools/malformed",
    "tools/seconds",
    "environments/chain_sum/level",
    "time/step",
)


def write_task(directory: Path, size: int) -> None:
    """Prompts to train on, others to evaluate on, pairs for the warm start, the tool and the reward."""
    draw = random.Random(0)

    def question() -> tuple[str, int, int]:
        a, b = draw.randint(100, 999), draw.randint(100, 999)
        return f"What is {a} * {b}?", a, b

    def row() -> str:
        text, a, b = question()
        return json.dumps({"prompt": [{"role": "user", "content": text}], "label": str(a * b)}) + "\n"

    (directory / "train.jsonl").write_text("".join(row() for _ in range(4096)))
    (directory / "eval.jsonl").write_text("".join(row() for _ in range(size)))
    (directory / "pairs.jsonl").write_text("".join(line for _ in range(256) for line in pairs(directory, *question())))
    (directory / "reward.py").write_text(REWARD)


def pairs(directory: Path, text: str, a: int, b: int) -> list[str]:
    """The two answers of one conversation, as prompt and response."""
    from miles_tool_calls.conversation import INSTRUCTIONS, result_messages
    from miles_tool_calls.functions import load_functions

    (directory / "tools.py").write_text(TOOLS)
    schemas = [json.dumps(function.schema["function"]) for function in load_functions((str(directory / "tools.py"),))]
    start = [
        {"role": "system", "content": INSTRUCTIONS.format(schemas="\n".join(schemas))},
        {"role": "user", "content": text},
    ]
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
    asked = f"<tool_call>\n{call}\n</tool_call>"
    result = result_messages(["multiply"], ["call00000"], [str(a * b)], "text")
    whole = [*start, {"role": "assistant", "content": asked}, *result]
    made = [{"prompt": start, "response": asked}, {"prompt": whole, "response": str(a * b)}]
    return [json.dumps(pair) + "\n" for pair in made]


def train(variant: str, seed: int, given: Any, directory: Path) -> dict[str, Any]:
    """Run one variant with one seed; returns its curve."""
    run = directory / f"{variant}-{seed}"
    flags = VARIANTS[variant].format(d=directory, sft=given.sft_steps, size=given.eval_size)
    command = f"--hf-checkpoint {given.model.resolve()} {COMMON} {flags} {given.more} --seed {seed} --save {run}"
    steps = f"--num-rollout {given.steps} --eval-interval {given.eval_interval}"
    # A later flag wins, so --more can make the run smaller.
    subprocess.run(
        [sys.executable, "-m", "miles_core", "train", *command.split(), *steps.split()], check=True, stdout=sys.stderr
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    accuracy = {row["step"]: round(row["eval/accuracy"], 4) for row in rows if "eval/accuracy" in row}
    print(f"{variant} seed {seed}: held-out accuracy {accuracy}", file=sys.stderr, flush=True)
    kept = {name: [round(row[name], 4) for row in rows if name in row] for name in KEPT}
    return {"accuracy": accuracy, **{name: values for name, values in kept.items() if values}}


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the held-out accuracy of every seed, and the mean of each variant."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for number, (variant, seeds) in enumerate(found.items()):
        steps = [*map(int, next(iter(seeds.values()))["accuracy"])]
        for curve in seeds.values():
            axes.plot(steps, list(curve["accuracy"].values()), color=f"C{number}", alpha=0.3, linewidth=1)
        means = [
            fmean(values) for values in zip(*(curve["accuracy"].values() for curve in seeds.values()), strict=True)
        ]
        axes.plot(steps, means, color=f"C{number}", linewidth=2, label=variant)
    axes.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    axes.legend()
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def versions() -> dict[str, str]:
    """Versions of the libraries that make the tasks."""
    return {
        name: metadata.version(name)
        for name in ("reasoning-gym",)
        if any(True for _ in metadata.distributions(name=name))
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, help="directory of SmolLM2-135M-Instruct, or another chat model")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-interval", type=int, default=10)
    parser.add_argument("--eval-size", type=int, default=128, help="held-out tasks")
    parser.add_argument("--sft-steps", type=int, default=30, help="steps of the warm start on calls")
    parser.add_argument("--more", default="", help="further flags of miles train, for smaller runs")
    parser.add_argument("--plot", type=Path, help="SVG file for the curves")
    parser.add_argument("--variant", default="", help="part of the result file's name, such as a device")
    parser.add_argument("--results", type=Path, nargs="+", default=[], help="saved results whose curves --plot draws")
    given = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    if given.results:
        for path in given.results:
            found |= json.loads(path.read_text(encoding="utf-8"))["curves"]
        chosen = {variant: found[variant] for variant in given.variants if variant in found}
        return draw(chosen, given.plot or parser.error("--results needs --plot FILE"))
    if given.model is None:
        parser.error("--model is missing")
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "metadata").mkdir()
        register(Path(name) / "metadata", ("tools", "environments", "tis"))
        if {"calculator", "without_tool"} & {
            *given.variants
        }:  # the plugin tools needs pydantic, which a GPU machine may lack
            write_task(Path(name), given.eval_size)
        runs = [(variant, seed) for variant in given.variants for seed in given.seeds]
        with ThreadPoolExecutor(given.jobs) as pool:
            curves = list(pool.map(lambda run: train(*run, given, Path(name)), runs))
        for (variant, seed), curve in zip(runs, curves, strict=True):
            found.setdefault(variant, {})[str(seed)] = curve
    if given.plot:
        draw(found, given.plot)
    flags = {variant: VARIANTS[variant] for variant in given.variants}
    finish(
        "tool_learning",
        {"common": COMMON, "more": given.more, "flags": flags, "curves": found},
        given.save,
        versions,
        given.variant,
    )


if __name__ == "__main__":
    main()
