"""The picture of the loop's states is up to date, and names what ``miles_core/loop.py`` does, in its order."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRAWN = runpy.run_path(str(ROOT / "docs" / "draw_loop.py"))


def test_the_picture_is_up_to_date():
    assert DRAWN["picture"]() == DRAWN["PICTURE"].read_text(encoding="utf-8"), "run: python docs/draw_loop.py"


def test_every_state_is_entered_by_the_loop():
    code = (ROOT / "miles_core" / "loop.py").read_text(encoding="utf-8")
    assert [state.name for state in DRAWN["STATES"].values() if state.code not in code] == []
    step = code[code.index("async def step(") :]
    order = [step.index(DRAWN["STATES"][name].code) for name in ("rollout", "learn", "sync")]
    assert order == sorted(order)


def test_the_page_shows_the_picture():
    assert "(loop.svg)" in (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
