"""The page of exact log-probabilities says what the result files say."""

import runpy
from pathlib import Path

DRAWN = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "draw_gaps.py"))


def test_the_page_is_up_to_date():
    assert DRAWN["render"]() == DRAWN["PAGE"].read_text(encoding="utf-8"), "run: python docs/draw_gaps.py"


def test_a_gap_above_zero_is_shown():
    gaps = {"float32": [2e-6, 0.0], "bfloat16": [0.04, 0.002]}
    assert DRAWN["row"]("qwen3", [gaps, gaps]) == "| qwen3 | 2e-06 | 0.04 | 2e-06 | 0.04 | 0, 0.002 |"
