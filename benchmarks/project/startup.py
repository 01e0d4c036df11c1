"""Start-up of the command line: processor seconds of whole processes, and the modules that they import.

These run alternately: ``miles --help``, ``miles train --help``, ``miles plan`` without a model, with plugins and with Qwen3-4B's configuration,
a plan that is refused after a search for fixes, and ``miles plan --search``. The processor seconds (user and system) of a busy machine vary
less than its wall-clock time. The turn that warms up compiles the modules.
``tests/cli/test_imports.py`` bounds the imports.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import ROOT, alternate, finish, installed, medians, options, spread

CODE = "import sys; from miles_core.cli.main import main; code = main(); print(len(sys.modules), file=sys.stderr); sys.exit(code)"
PARTS = ["--runtime", "ray", "--engine", "sglang", "--trainer", "megatron"]
COMMANDS = {
    "miles --help": ["--help"],
    "miles train --help": ["train", "--help"],
    "miles plan": ["plan"],
    "miles plan --plugins": ["plan", "--plugins", "tis,r3,lora"],
    "miles plan --hf-checkpoint": ["plan", "--hf-checkpoint", "MODEL"],
    "miles plan, refused": [
        "plan",
        "--hf-checkpoint",
        "MODEL",
        "--hardware",
        "8xH100",
        *PARTS,
        "--actor-num-gpus-per-node",
        "8",
    ],
    "miles plan --search": ["plan", "--search", "--hf-checkpoint", "MODEL", "--hardware", "8x8xH100"],
}


class Command:
    """A command line that one turn runs in a fresh interpreter."""

    def __init__(self, name: str, words: list[str], bytecode: str) -> None:
        self.name, self.words = name, words
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": bytecode}
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def turn(self) -> dict[str, float]:
        """Run it; returns its processor seconds and number of modules."""
        before = os.times()
        done = subprocess.run(
            [sys.executable, "-c", CODE, *self.words], capture_output=True, text=True, env=self.environment, cwd=ROOT
        )
        after = os.times()
        if done.returncode != (2 if "refused" in self.name else 0):
            sys.exit(f"{self.name} failed (exit code {done.returncode}):\n{done.stderr}")
        used = after.children_user + after.children_system - before.children_user - before.children_system
        return {"seconds": used, "modules": int(done.stderr.split()[-1])}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "tests" / "published" / "qwen3-4b.json", Path(folder) / "config.json")
        bytecode = str(Path(folder) / "bytecode")
        commands = [
            Command(n, [folder if w == "MODEL" else w for w in words], bytecode) for n, words in COMMANDS.items()
        ]
        reports = alternate(commands, given.turns, warm_up=1)
    result = {name: {**medians(turns), "range": spread(turns)} for name, turns in reports.items()}
    finish("startup", {"processor_seconds": result}, given.save, lambda: installed("miles-core"))


if __name__ == "__main__":
    main()
