"""The tutorial on its real model: held-out accuracy and seconds a step; the last line is one JSON object.

Its files and options are taken out of docs/tutorial.md. ``--run`` reports on a run directory that is there instead.
"""

from __future__ import annotations

import os
import re
import runpy
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import finish, installed, options

ROOT = Path(__file__).resolve().parents[2]
MODEL = "SmolLM2-135M-Instruct"
TOOL = {
    "prompt_data": "tool.jsonl",
    "eval_prompt_data": "tool_eval.jsonl",
    "custom_generate_function_path": "calculator.py",
    "rollout_max_response_len": 32,
}


def trained(model: Path, tool: bool, steps: int) -> list[dict[str, Any]]:
    """Run the tutorial in a directory of its own; its metrics."""
    from miles_core.api import train

    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    for code in re.findall(r"^```(?:python|yaml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if named := re.match(r"# (\w+\.\w+)\n", code):
            Path(named[1]).write_text(code, encoding="utf-8")
    Path(MODEL).symlink_to(model)
    for script in ("data.py", "tool_data.py"):
        runpy.run_path(script)
    more = TOOL if tool else {}
    return train(config="sums.yaml", plugins=["tis"], num_rollout=steps, save="run", **more).metrics


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, help=f"directory of {MODEL}")
    parser.add_argument("--tool", action="store_true", help="the part with the calculator")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--run", type=Path, help="a run directory that is there")
    given = parser.parse_args()
    if given.run is not None:
        from miles_core.observe.metrics import read

        metrics = read(given.run / "metrics.jsonl")
    else:
        if given.model is None:
            parser.error(f"give --model, the directory of {MODEL}, or --run")
        model = given.model.resolve()
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            metrics = trained(model, given.tool, given.steps)
    result = {
        "part": "tool" if given.tool else "sums",
        "accuracy": {r["step"]: round(r["eval/accuracy"], 3) for r in metrics if "eval/accuracy" in r},
        "reward": {r["step"]: round(r["reward/mean"], 3) for r in metrics if "reward/mean" in r},
        "seconds_a_step": round(median(r["time/step"] for r in metrics if r["step"]), 1),
    }
    finish(
        "tutorial", result, given.save, lambda: installed("miles-core", "torch", "transformers"), "tool" * given.tool
    )


if __name__ == "__main__":
    main()
