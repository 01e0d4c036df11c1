"""Type every recipe through the plan and write the table of recipes/README.md: python recipes/write_index.py > recipes/README.md

The first line of a recipe's run.yaml describes it. The models of planned recipes are the ``config.json`` files of tests/published, so
nothing is downloaded. Seconds are the planner's estimates.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from miles_core.cli.main import main as miles

HERE = Path(__file__).parent
#: Folder of a recipe for a model that we cannot run -> GPUs; the model's config.json is tests/published/FOLDER.json.
PLANNED = {"qwen3-30b-a3b": "8xH200", "qwen3-235b-a22b": "64xH200", "deepseek-v3": "128xH200", "kimi-k2": "256xH200"}
#: Mean response of the estimates, in tokens.
MEAN = 4000

INTRODUCTION = """# Recipes

Each folder has one configuration, `run.yaml`, and a page with the command, the expected result, its cost, and how to read the run. Run the
commands in the root of a checkout. `tests/docs/test_recipes.py` plans every recipe. Written by
`python recipes/write_index.py > recipes/README.md`.

## On a laptop or one GPU

| recipe | |
|---|---|
"""
LARGE = f"""
## On a cluster, planned and not run

We have no such machines: the plan accepts these recipes, and they have never been run. Memory is the plan's
estimate. Seconds per step are the planner's estimate for responses of {MEAN:,} tokens on average
([how they are made, and how far they were off for published runs](../docs/planning.md)).

| recipe | GPUs | engine, GB per GPU | trainer, GB of the fullest GPU | host memory per machine, GB | seconds per step |
|---|---|--:|--:|--:|--:|
"""


def list_recipes() -> list[str]:
    """Return the folders with a recipe, sorted."""
    return sorted(path.parent.name for path in HERE.glob("*/run.yaml"))


def describe(name: str) -> str:
    """Return the first line of a recipe."""
    return (HERE / name / "run.yaml").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def call(*words: str) -> str:
    """Run ``miles`` in this process; return what it prints.

    Raises SystemExit if it fails.
    """
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = miles([*words])
    if code:
        raise SystemExit(f"miles {' '.join(words)} failed:\n{output.getvalue()}")
    return output.getvalue()


def plan(name: str, directory: Path) -> str:
    """Return the row of a planned recipe."""
    model = directory / name
    model.mkdir()
    shutil.copy(HERE.parent / "tests" / "published" / f"{name}.json", model / "config.json")
    words = ["--config", str(HERE / name / "run.yaml"), "--hf-checkpoint", str(model), "--hardware", PLANNED[name]]
    text = call("plan", *words)
    typed = json.loads(call("plan", "--search", "--json", "--mean-response-len", str(MEAN), *words))["typed"]
    heads, *rows = text.partition("memory of a GPU in GB\n")[2].splitlines()
    column = re.split(r" {2,}", heads.strip()).index("in all")
    totals: dict[str, float] = {}
    for line in rows:
        cells = re.split(r" {2,}", line.strip())
        if len(cells) <= column:
            break
        kind = cells[0].split(",")[0]
        totals[kind] = max(totals.get(kind, 0.0), float(cells[column]))
    host = re.findall(r"about ([\d,]+) GB of host memory", text)[0]
    sizes = f"{totals['engine']:.0f} | {totals['trainer']:.0f} | {host} | {typed['seconds']:.0f}"
    return f"| [`{name}`]({name}/README.md) | {PLANNED[name]} | {sizes} |\n"


def main() -> None:
    """Print the page."""
    small = (f"| [`{name}`]({name}/README.md) | {describe(name)} |\n" for name in list_recipes() if name not in PLANNED)
    with tempfile.TemporaryDirectory() as directory:
        large = [plan(name, Path(directory)) for name in PLANNED]
    other = "\nSlime's and verl's scripts for Qwen3-30B-A3B, side by side with the same runs here: [one node](qwen3-30b-a3b-one-node.md).\n"
    sys.stdout.write(INTRODUCTION + "".join(small) + LARGE + "".join(large) + other)


if __name__ == "__main__":
    main()
