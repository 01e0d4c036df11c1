"""Do policies that play each other rise above the baseline that they start from?

Run: ``python benchmarks/learning/coevolution.py --threads 2 --save`` (some minutes per seed; the tasks need ``reasoning-gym``). Two games whose
results are exact, on models of 0.1 M parameters after a supervised warm start:

- Nim (warm start: random legal moves). The probability of winning against perfect play, mean over all piles that can be won: exact, computed from
  the policies' probabilities (``nim_exact.py``). Self-play with past versions, two policies in alternating and in simultaneous phases, and a
  population of four.
- Proposer against solver (warm start: valid tasks at random, and a few answers). The solver's accuracy on held-out questions of every task
  and level, and the proposer's score; both learn in every step, or in turns. The comparison keeps the proposer at random tasks (``--lr 0`` in
  its table).

``curve`` are the means of evaluations at the start and after each quarter of the steps, in which moves and answers are sampled.
With ``--runs DIR`` the results of finished runs stay in a directory, and a command that was stopped goes on from them.
The last line of the output is one JSON object: values before and after, and gains paired by seed, with 95 % intervals over seeds.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.learning.nim_exact import exact_score
from benchmarks.learning.seeds import change_of, made_in, mean_of, work_in_processes, workplace
from benchmarks.measure import finish, installed, options

PILES = "1-12"
#: Flags of all runs.
SHARED: dict[str, Any] = {
    "plugins": "coevolution",
    "rm-type": "game",
    "lr": 0.002,
    "lr-decay-style": "linear",
    "weight-decay": 0,
    "adam-beta2": 0.99,
    "use-dynamic-batch-size": "true",
    "max-tokens-per-gpu": 16384,
    "rollout-batch-size": 24,
    "n-samples-per-prompt": 8,
    "rollout-max-response-len": 4,
    "n-samples-per-eval-prompt": 8,
    "log-level": "error",
}
#: Flags of each game.
GAMES: dict[str, dict[str, Any]] = {
    "nim": {
        "generate": "nim",
        "prompts": "nim",
        "prompt-data": PILES,
        "eval-prompts": "nim",
        "eval-prompt-data": PILES,
    },
    "tasks": {"generate": "proposer", "prompts": "tasks", "eval-prompts": "tasks", "eval-prompt-data": 4},
}
#: Enough for one version of every eight steps of a run: a player that meets its latest versions only forgets how to beat the first ones.
PAST = "past_versions: 16"
TWO = "policies: {one: {}, two: {}}\n"
PLAY = "policies: {proposer: {lr: 1.0e-3, entropy_coef: 0.01}, solver: {}}\n"
#: The comparison for the tasks.
BASE = "tasks, proposer at random"
#: Name -> (game, configuration file).
MODES = {
    "nim, self-play with past versions": ("nim", f"co_evolution: {{{PAST}, interval: 8}}\n"),
    "nim, two policies alternating": ("nim", f"{TWO}co_evolution: {{strategy: alternating, interval: 4, {PAST}}}\n"),
    "nim, two policies simultaneous": ("nim", f"{TWO}co_evolution: {{strategy: simultaneous, interval: 8, {PAST}}}\n"),
    "nim, population of four": ("nim", "co_evolution: {strategy: simultaneous, population_size: 4, interval: 8}\n"),
    "tasks, simultaneous": ("tasks", f"{PLAY}co_evolution: {{strategy: simultaneous}}\n"),
    "tasks, alternating": ("tasks", f"{PLAY}co_evolution: {{strategy: alternating, interval: 4}}\n"),
    BASE: (
        "tasks",
        "policies: {proposer: {lr: 0}, solver: {}}\nco_evolution: {strategy: simultaneous}\n",
    ),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each mode")
    parser.add_argument("--seed-numbers", type=int, nargs="+", help="these seeds, instead of the first --seeds")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--warm-start", type=int, default=300, help="supervised steps of the common start")
    parser.add_argument("--only", default="", help="modes whose name contains this")
    parser.add_argument("--variant", default="", help="end of the result file's name")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--runs", default="", help="directory that keeps the results of finished runs")
    chosen = parser.parse_args()
    modes = [name for name in MODES if chosen.only in name]
    seeds = chosen.seed_numbers or list(range(chosen.seeds))
    games = dict.fromkeys(MODES[name][0] for name in modes)
    versions = ["miles-core", "miles-plugin-coevolution", "torch", "transformers"]
    versions += ["reasoning-gym"] if "tasks" in games else []
    result: dict[str, Any] = {"seeds": seeds, "steps": chosen.steps, "warm_start": chosen.warm_start}
    if "nim" in games:
        result["piles"] = PILES
    with workplace(chosen.runs, lambda: installed(*versions)) as directory:
        shared: dict[str, Any] = {"jobs": chosen.jobs, "threads": chosen.threads, "directory": directory}
        shared |= {"kept": directory if chosen.runs else None}
        work_in_processes(
            warm_start, [(seed, game) for seed in seeds for game in games], steps=chosen.warm_start, **shared
        )
        keys = [(seed, name) for seed in seeds for name in modes]
        found = work_in_processes(learn, keys, steps=chosen.steps, **shared)
        result |= made_in(directory)
    runs = {name: [found[seed, name] for seed in seeds] for name in modes}
    result["modes"] = {name: {"configuration": MODES[name][1], **summary(found)} for name, found in runs.items()}
    if BASE in runs:
        for name in (name for name in runs if MODES[name][0] == "tasks" and name != BASE):
            result["modes"][name] |= above(differences(runs[name], runs[BASE]))
    variant = chosen.variant or chosen.only.replace(" ", "-").replace(",", "")
    finish(Path(__file__).stem, result, chosen.save, lambda: installed(*versions), variant)


def differences(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> list[float]:
    """Held-out results at the end minus those of the comparison, by seed."""
    return [own["held_out"][1] - other["held_out"][1] for own, other in zip(runs, base, strict=True)]


def above(values: Sequence[float]) -> dict[str, Any]:
    """The differences of all seeds, and their mean."""
    return {"minus_baseline": mean_of(values), "minus_baseline_of_each_seed": [round(value, 4) for value in values]}


def warm_start(seed: int, game: str, directory: Path, steps: int) -> None:
    """A model that plays legal moves, or proposes valid tasks, at random: the baseline, in ``directory/SEED/game``."""
    from miles_tools.demo.model import Size, make_checkpoint

    directory = directory / str(seed)
    make_checkpoint(directory / f"{game}-model", seed, Size(layers=2, experts=4, expert_hidden=64, context=512))
    draw, file = random.Random(seed), directory / f"{game}.jsonl"
    rows = nim_rows(draw) if game == "nim" else task_rows(draw)
    file.write_text("\n".join(json.dumps({"prompt": p, "response": r}) for p, r in rows) + "\n", encoding="utf-8")
    start = {"hf-checkpoint": directory / f"{game}-model", "save": directory / f"{game}-warm", "seed": seed}
    data = {
        "prompt-data": file,
        "input-key": "prompt",
        "label-key": "response",
        "rm-type": "exact",
        "log-level": "error",
    }
    warm = {"sft-data": file, "sft-steps": steps, "sft-batch-size": 64, "sft-lr": 0.003, "num-rollout": 0}
    run({**start, **data, **warm, "export-hf": directory / game})


def nim_rows(draw: random.Random, count: int = 2000) -> list[tuple[str, str]]:
    """Random games: the text before a move, and a random legal move."""
    rows = []
    for _ in range(count):
        pile, text = draw.randint(1, int(PILES.partition("-")[2])), ""
        while pile:
            text, move = f"{text}{pile}:", draw.randint(1, min(3, pile))
            rows.append((text, str(move)))
            text, pile = f"{text}{move} ", pile - move
    return rows


def task_rows(draw: random.Random, count: int = 1500) -> list[tuple[str, str]]:
    """Tasks at random, and answers to random questions."""
    from miles_coevolution.proposer import PROPOSE, TASKS, make_question

    rows = []
    for number in range(count):
        letter = draw.choice(list(TASKS))
        level = draw.randint(1, TASKS[letter].levels)
        question = make_question(letter, level, (1 << 41) + number)
        rows += [(PROPOSE, f"{letter}{level}"), (question.text, str(question.entry["answer"]))]
    return rows


def learn(seed: int, name: str, directory: Path, steps: int) -> dict[str, Any]:
    """One run: held-out games before, on the way and after, and the scores of the last fifth of its steps."""
    from miles_core.observe.metrics import read

    (game, text), directory = MODES[name], directory / str(seed)
    own = Path(tempfile.mkdtemp(dir=directory))
    save, file = own / "run", own / "run.yaml"
    file.write_text(text, encoding="utf-8")
    flags = {**SHARED, **GAMES[game], "config": file, "hf-checkpoint": directory / game, "save": save, "seed": seed}
    flags |= {"num-rollout": steps, "eval-interval": max(steps // 4, 1), "export-hf": own / "policies"}
    run(flags)
    metrics = read(save / "metrics.jsonl")
    curve = [round(m["eval/reward"], 4) for m in metrics if "eval/reward" in m]
    ends = [nim_score(directory / game), nim_score(own / "policies")] if game == "nim" else [curve[0], curve[-1]]
    shutil.rmtree(own)
    trained = [m for m in metrics if any(name.endswith("train/loss") for name in m)]
    last = trained[-max(len(trained) // 5, 1) :]
    names = [
        n for n in last[-1] if n.startswith("coevolution/") and n.endswith(("/score", "/win", "_past", "dominance"))
    ]
    names += [n for n in ("nim/optimal_moves", "proposer/valid", "proposer/solved", "proposer/level") if n in last[-1]]
    result = {
        "held_out": [round(value, 4) for value in ends],
        "curve": curve,
        "last": {n: round(statistics.mean(m[n] for m in last if n in m), 4) for n in names},
        "seconds": round(statistics.median(m["time/step"] for m in trained), 4),
    }
    print(f"seed {seed}  {name:<36}", result, file=sys.stderr, flush=True)
    return result


def nim_score(directory: Path) -> float:
    """Mean exact score of all models in a directory."""
    low, _, high = PILES.partition("-")
    models = sorted(file.parent for file in directory.glob("**/config.json"))
    return statistics.fmean(exact_score(model, range(int(low), int(high) + 1)) for model in models)


def run(flags: Mapping[str, Any]) -> None:
    """An ordinary ``miles train``."""
    from miles_core.cli import train as command

    words = [
        word for name, value in flags.items() for word in (f"--{name}", *([] if value == "true" else [str(value)]))
    ]
    with redirect_stdout(sys.stderr):
        if command.run(words):
            raise SystemExit("a run was stopped")


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means, and half-widths of 95 % intervals over seeds."""
    found = change_of([r["held_out"] for r in runs])
    found["curve"] = [mean_of(values) for values in zip(*(r["curve"] for r in runs), strict=True)]
    names = runs[0]["last"]
    found["last"] = {name: round(statistics.mean(r["last"].get(name, 0.0) for r in runs), 4) for name in names}
    return found | {"seconds": round(statistics.mean(r["seconds"] for r in runs), 3)}


if __name__ == "__main__":
    main()
