"""Core works with nothing but its own files, a tokenizer, and a double of an engine and a trainer in one file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles_testing.toy import toy_files

ROOT = Path(__file__).parents[2]
#: Runs ``miles`` with every other package of this repository made unimportable, and without installed plugins.
MILES = """
import sys
from importlib import metadata

class Absent:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root.startswith("miles_") and root != "miles_core" and not root.startswith("miles_plugin_file_"):
            raise ModuleNotFoundError(f"No module named {root!r}", name=root)

sys.meta_path.insert(0, Absent())
real = metadata.entry_points
metadata.entry_points = lambda **wanted: real(**wanted) if wanted.get("group") != "miles.plugins" else ()
from miles_core.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function that runs ``miles`` with only ``miles_core`` on the path."""
    place = tmp_path_factory.mktemp("alone")
    (place / "site").mkdir()
    (place / "site" / "miles_core").symlink_to(ROOT / "miles_core")
    shutil.copy(Path(__file__).with_name("bigram.py"), place)

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(place / "site")}
        return subprocess.run(
            [sys.executable, "-c", MILES, *words], capture_output=True, text=True, cwd=place, env=environment
        )

    run.place = place
    return run


def test_it_prints_help_and_a_plan(alone):
    shown = alone("train", "--help")
    assert "--rollout-batch-size" in shown.stdout, shown.stderr
    planned = alone("plan", "--plugins", "./bigram.py", "--engine", "bigram", "--trainer", "bigram")
    assert "bigram" in planned.stdout, planned.stderr


def test_it_trains_writes_metrics_and_a_checkpoint(alone):
    files = toy_files("qwen3_moe")
    model = alone.place / "model"
    model.mkdir()
    for file in (files / "model").glob("*.json"):
        shutil.copy(file, model)
    run = alone(
        *("train", "--plugins", "./bigram.py", "--engine", "bigram", "--trainer", "bigram", "--hf-checkpoint", "model"),
        *("--prompt-data", str(files / "prompts.jsonl"), "--custom-rm-path", str(files / "reward.py")),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-rollout", "2", "--save-interval", "2"),
        *("--rollout-max-response-len", "4", "--save", "out", "--device", "cpu", "--lr", "0.1"),
    )
    assert run.returncode == 0, run.stderr
    steps = [json.loads(line) for line in (alone.place / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps] == [1, 2] and steps[-1]["sync/bytes"] > 0
    assert list((alone.place / "out").rglob("model.safetensors"))
