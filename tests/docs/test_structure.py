"""The page about the structure says what the code says."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
DRAWN = runpy.run_path(str(ROOT / "docs" / "draw_structure.py"))
PAGE = DRAWN["PAGE"].read_text(encoding="utf-8")


def test_page_and_picture_are_up_to_date():
    stale = "run: python docs/draw_structure.py"
    assert DRAWN["picture"]() == DRAWN["PICTURE"].read_text(encoding="utf-8"), stale
    assert DRAWN["page"](PAGE) == PAGE, stale


def test_everything_the_page_names_is_there():
    named = re.findall(r"`((?:miles_\w+|plugins|tests)/[\w/.]*)`", PAGE)
    assert len(named) > 20
    assert [path for path in named if not (ROOT / path).exists()] == []
