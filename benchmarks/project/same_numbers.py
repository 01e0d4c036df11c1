"""Did a refactoring change a number? The same short runs by the code of two checkouts, compared bit for bit.

Run: ``python benchmarks/project/same_numbers.py --before CHECKOUT --after CHECKOUT`` (two minutes). Every case is a few commands of
``miles``, the same words on both sides, in a process of its own with one thread. Compared are all metrics of every step
that are not times, the samples, all tensors of checkpoint and export, the bytes of converted checkpoints, and what ``miles
verify --budget`` prints. A name that only one side has is a difference too. The last line of the output is one JSON
object; the exit code is 1 when anything differs. A side's code and plugins are those of its checkout, whatever is installed:
its packages and the entry points of its ``pyproject.toml`` files come first on the import path.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.measure import commit, finish, installed
from miles_testing.tiny import tiny_checkpoint

#: Paths are relative to a case's directory, so that both sides write the same ones.
TRAIN = """train --hf-checkpoint ../../inputs/moe --prompt-data ../../inputs/prompts.jsonl --num-rollout 3
    --custom-rm-path ../../inputs/reward.py --rollout-batch-size 2 --n-samples-per-prompt 4 --micro-batch-size 4
    --rollout-max-response-len 8 --lr 1e-3 --save run --export-hf exported --log-level error"""
BOTH = "--emulate-precision --rollout-precision {0} --train-precision {0}"
VERIFY = """verify --hf-checkpoint ../../inputs/moe --budget --json --rollout-precision fp8 --emulate-precision
    --verify-logprobs-tolerance 100 --log-level error"""
WARM_START = "--sft-data ../../inputs/prompts.jsonl --sft-steps 2 --sft-lr 1e-3 --eval-interval 2"
PPO = "--plugins ppo --advantage-estimator ppo --gamma 0.9 --lambd 0.8 --num-steps-per-rollout 2"
OTHERS = ("gmpo", "sapo", "dppo", "dro")
FORMATS = {"fp8": "", "mxfp8": "", "nvfp4": "", "int4": "--int4-group-size 32"}
CONVERT = [f"convert --to {f} --model-dir ../../inputs/moe --save-dir converted/{f} {FORMATS[f]}" for f in FORMATS]
CONVERT += [f"convert --to bf16 --model-dir converted/{name} --save-dir converted/{name}-bf16" for name in FORMATS]

CASES = {
    "bare": TRAIN,
    "dense": f"{TRAIN} --hf-checkpoint ../../inputs/dense --rollout-shuffle --max-tokens-per-gpu 40 --use-dynamic-batch-size",
    "bfloat16": f"{TRAIN} --dtype bfloat16",
    "kl": f"{TRAIN} --kl-loss-coef 0.05 --entropy-coef 0.01 --num-steps-per-rollout 2",
    "r3_tis": f"{TRAIN} --plugins r3,tis --use-tis --rollout-precision fp8 --emulate-precision",
    **{name: f"{TRAIN} {BOTH.format(name)} {flags}" for name, flags in FORMATS.items()},
    "gspo": f"{TRAIN} --advantage-estimator gspo --num-steps-per-rollout 2",
    "reinforce_plus_plus": f"{TRAIN} --advantage-estimator reinforce_plus_plus --kl-coef 0.05 --gamma 0.9",
    "dapo": f"{TRAIN} --plugins objectives --preset dapo --overlong-buffer-len 4",
    "dr_grpo": f"{TRAIN} --advantage-estimator dr_grpo --loss-aggregation constant --eps-clip-c 3 --num-steps-per-rollout 2",
    "rloo": f"{TRAIN} --advantage-estimator rloo",
    "cispo": f"{TRAIN} --advantage-estimator cispo --eps-clip-high 0.3 --num-steps-per-rollout 2",
    "ppo": f"{TRAIN} {PPO} --value-clip 0.2 --kl-coef 0.05 --normalize-advantages",
    "ppo_trunk": f"{TRAIN} {PPO} --critic-trunk policy --num-critic-only-steps 1",
    **{name: f"{TRAIN} --plugins objectives --advantage-estimator {name} --num-steps-per-rollout 2" for name in OTHERS},
    "precision_warm_up": f"{TRAIN} {BOTH.format('fp8')} --warmup-steps 1",
    "resume": f"{TRAIN} --num-rollout 2 --save first --export-hf half && {TRAIN} --num-rollout 4 --load first",
    "warm_start": f"{TRAIN} {WARM_START} --eval-prompt-data ../../inputs/prompts.jsonl",
    "convert": " && ".join(CONVERT),
    "verify": VERIFY,
}

#: Keys of what a clock or a path says.
NOT_COMPARED = re.compile(r"time|time/.*|.*per_second|.*seconds|page")
GROUP = "miles.plugins"
PLUGINS = f"from importlib.metadata import entry_points as e; print(*(p.dist.name for p in e(group={GROUP!r})))"
ORIGINS = "import sys; from importlib import import_module as i; [print(i(name).__file__) for name in sys.argv[1:]]"
#: A run does not seed the process's own generators, but keeps their states in its checkpoints, which are compared.
COMMANDS = """
import json, random, sys, numpy, torch
from {} import {} as main
[seed(0) for seed in (random.seed, numpy.random.seed, torch.manual_seed)]
sys.exit(next((code for words in json.loads(sys.argv[1]) if (code := main(words))), 0))
"""
REWARD = """async def reward(args, sample):
    return sum(ord(c) % 2 == 0 for c in sample.response) / max(len(sample.response), 1)
"""


@dataclass
class Side:
    """One checkout's code, and where its runs are."""

    name: str
    checkout: Path
    python: str
    work: Path
    flags: str
    code: str = ""

    def projects(self) -> list[Path]:
        """The ``pyproject.toml`` files of the checkout, its own first."""
        found = [p for deep in ("", "[!.]*/", "[!.]*/*/") for p in sorted(self.checkout.glob(f"{deep}pyproject.toml"))]
        return found or sys.exit(f"{self.checkout} has no pyproject.toml")

    def environment(self) -> dict[str, str]:
        """One thread, no hub, and an import path that starts with the checkout's entry points and packages."""
        outer = filter(None, [os.environ.get("PYTHONPATH")])  # libraries of a machine without an installation
        path = os.pathsep.join([str(self.work / "entry_points"), *(str(p.parent) for p in self.projects()), *outer])
        return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def output(self, code: str, *words: str) -> str:
        """What ``code`` prints."""
        command, environment = [self.python, "-P", "-c", code, *words], self.environment()
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=self.work.parent)
        return done.stdout if done.returncode == 0 else sys.exit(f"{self.name}: its code cannot be used; see above")

    def start(self, case: str) -> subprocess.Popen[bytes]:
        """The case's commands, in a process in its directory; ``printed.txt`` and ``errors.txt`` are its output."""
        directory = self.work / case
        directory.mkdir(parents=True)
        apart = ("convert", "bfloat16")  # a conversion takes no flags of a run, and the kernels are of float32 models
        commands = [f"{c} {self.flags * (not any(a in c for a in apart))}".split() for c in CASES[case].split(" && ")]
        return self.run(directory, commands)

    def run(self, directory: Path, commands: list[list[str]], **environment: str) -> subprocess.Popen[bytes]:
        """Commands of ``miles`` in a process in a directory; ``printed.txt`` and ``errors.txt`` are its output."""
        directory.mkdir(parents=True, exist_ok=True)
        words, settings = [self.python, "-P", "-c", self.code, json.dumps(commands)], self.environment() | environment
        with (directory / "printed.txt").open("wb") as out, (directory / "errors.txt").open("wb") as errors:
            return subprocess.Popen(words, cwd=directory, env=settings, stdout=out, stderr=errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("before", "after"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="CHECKOUT", help=f"the code {name}")
        parser.add_argument(f"--{name}-python", default=sys.executable, help="interpreter for it (default: this one)")
        parser.add_argument(f"--{name}-flags", help="of its runs (default: --cpu-kernels torch where there is that)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument(
        "--added",
        nargs="*",
        default=[],
        metavar="NAME",
        help="entries that the earlier side does not have, such as policy",
    )
    parser.add_argument("--work", type=Path, help="keep the runs in this new directory")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/NAME-DATE.json")
    chosen = parser.parse_args()
    cases = chosen.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        work = (chosen.work or Path(temporary)).resolve()
        make_inputs(work / "inputs")
        before = prepare("before", chosen.before, chosen.before_python, chosen.before_flags, work)
        after = prepare("after", chosen.after, chosen.after_python, chosen.after_flags, work)
        print(f"{'case':<20} {'compared':>8}  result", flush=True)
        outcomes = {case: compare(case, before, after, chosen.added) for case in cases}
    same = all(o["same"] for o in outcomes.values())
    sides = {side.name: commit(side.checkout) for side in (before, after)}
    finish(Path(__file__).stem, {"same": same, **sides, "cases": outcomes}, chosen.save, lambda: installed("torch"))
    sys.exit(not same)


def make_inputs(directory: Path) -> None:
    """A mixture of experts and a dense model, both random, with a tokenizer of characters, prompts and a reward."""
    tiny_checkpoint("qwen3_moe", directory / "moe", hidden_size=64, moe_intermediate_size=32)
    tiny_checkpoint("qwen3", directory / "dense", hidden_size=64)
    rows = [{"input": f"{i}+{i}=", "response": str(2 * i)} for i in range(3, 11)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "reward.py").write_text(REWARD)


def prepare(name: str, checkout: Path, python: str, flags: str | None, work: Path) -> Side:
    """A side that is known to run its checkout's code, and torch's products where that can be chosen."""
    side = Side(name, checkout.resolve(), os.path.abspath(shutil.which(python) or python), work / name, flags or "")
    projects = [tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in side.projects()]
    declared = {project["name"]: project.get("entry-points", {}) for project in projects}
    elsewhere = side.output(PLUGINS).split()  # those that the checkout does not have get no entry point
    write_entry_points(side.work / "entry_points", {name: {} for name in elsewhere} | declared)
    module, function = projects[0]["scripts"]["miles"].split(":")
    manifests = [target for groups in declared.values() for target in groups.get(GROUP, {}).values()]
    modules = [module, *(target.partition(":")[0] for target in manifests)]
    for origin in side.output(ORIGINS, *modules).splitlines():
        if not Path(origin).resolve().is_relative_to(side.checkout):
            raise SystemExit(f"{name}: {origin} is not in {side.checkout}")
    side.code = COMMANDS.format(module, function)
    if flags is None and "--cpu-kernels" in side.output(side.code, '[["train", "--help"]]'):
        side.flags = "--cpu-kernels torch"  # compiled kernels round otherwise; torch is compared with torch
    print(f"{name}: {', '.join(m.partition('.')[0] for m in modules)} {side.flags}", file=sys.stderr)
    return side


def write_entry_points(directory: Path, distributions: dict[str, dict[str, dict[str, str]]]) -> None:
    """Distributions with these entry points and nothing else: first on the import path, they hide installed namesakes."""
    for distribution, groups in distributions.items():
        home = directory / f"{distribution.replace('-', '_')}-0.1.0.dist-info"
        home.mkdir(parents=True)
        (home / "METADATA").write_text(f"Name: {distribution}\nVersion: 0.1.0\n")
        lines = [line for group in groups for line in (f"[{group}]", *map(" = ".join, groups[group].items()))]
        (home / "entry_points.txt").write_text("\n".join(lines))


def compare(case: str, before: Side, after: Side, added: Collection[str] = ()) -> dict[str, Any]:
    """A case on both sides at the same time; prints its row of the table and returns what that says.

    Entries with a name in ``added`` that only the later side has are counted and not compared.
    """
    started = [(side, side.start(case)) for side in (before, after)]
    stopped = [side for side, process in started if process.wait()]
    left, right = (dict(read_numbers(side.work / case)) for side in (before, after))
    new = {name for name in right.keys() - left.keys() if name.rpartition(" ")[2] in added}
    pairs = {name: (left.get(name, "nothing"), right.get(name, "nothing")) for name in left | right if name not in new}
    differing = {name: difference(a, b) for name, (a, b) in pairs.items() if bits(a) != bits(b)}
    outcome: dict[str, Any] = {
        "same": not stopped and not differing and bool(left),
        "compared": len(pairs),
        "added": len(new),
    }
    if stopped or not left:
        errors = {s.name: (s.work / case / "errors.txt").read_text().splitlines()[-1:] for s in stopped}
        outcome["failed"] = text = f"failed: {errors}" if errors else "there is nothing to compare"
    elif differing:
        name, (a, b, _) = next(iter(differing.items()))
        largest = max((r for _, _, r in differing.values() if r is not None), default=None)
        outcome |= {"differing": len(differing), "first": name, "before": a, "after": b, "largest_relative": largest}
        text = f"{len(differing)} differ, largest relative difference {largest}; first {name}: {a} before, {b} after"
    print(f"{case:<20} {len(pairs):>8}  {'same' if outcome['same'] else text}", flush=True)
    return outcome


def read_numbers(directory: Path) -> Iterator[tuple[str, Any]]:
    """(name, value or tensor) of everything to compare that a case left, its metrics first."""
    for wanted in ("metrics.jsonl", "*.jsonl.gz", "printed.txt", "config.json", "*.safetensors"):
        for path in sorted(directory.rglob(wanted)):
            name = str(path.relative_to(directory))
            if path.suffix == ".safetensors":
                yield from ((f"{name} {tensor}", value) for tensor, value in sorted(load_file(path).items()))
            elif path.suffix == ".json":
                yield from leaves(name, json.loads(path.read_text()))
            else:
                text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
                yield from leaves(name, [json.loads(line) for line in text.split("\n") if line[:1] == "{"])
    for path in sorted(directory.glob("converted/*/*.safetensors")):
        yield f"{path.relative_to(directory)} sha256", hashlib.sha256(path.read_bytes()).hexdigest()


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers and texts in a JSON value, by name; what is in a list is counted from 1."""
    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value, 1):
        if not NOT_COMPARED.fullmatch(str(key)):
            yield from leaves(f"{name} {key}", entry)


def bits(value: Any) -> Any:
    """What two values share exactly when they are the same to the last bit."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return str(value.dtype), value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()


def difference(before: Any, after: Any) -> tuple[str, str, float | None]:
    """Both values where they first differ, and the largest relative difference (None if they are not numbers alike)."""
    if isinstance(before, int | float) and isinstance(after, int | float):
        before, after = (torch.tensor(x, dtype=torch.float64) for x in (before, after))
    tensors = [x for x in (before, after) if isinstance(x, torch.Tensor)]
    if len(tensors) < 2 or before.dtype != after.dtype or before.shape != after.shape:
        texts = [f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else str(x) for x in (before, after)]
        return texts[0], texts[1], None
    a, b = (x.reshape(-1).double() for x in tensors)
    where = ((a != b) | (a.signbit() != b.signbit())).nonzero()[:, 0]
    relative = ((a - b).abs() / torch.maximum(a.abs(), b.abs()))[where].nan_to_num().max().item()
    return str(a[where[0]].item()), str(b[where[0]].item()), relative


if __name__ == "__main__":
    main()
