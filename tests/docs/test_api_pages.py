"""The API pages of a checkout hold the signatures of every public name, and are current."""

import re
import runpy
from importlib import import_module
from pathlib import Path

import pytest

from miles_core.plugin.renamed import PUBLIC

ROOT = Path(__file__).parents[2]
WRITER = runpy.run_path(str(ROOT / "docs" / "write_api.py"))
PAGES = WRITER["pages"]()


@pytest.mark.parametrize("module", PAGES)
def test_a_page_is_current_and_has_every_name(module):
    page = (ROOT / "docs" / "api" / f"{module}.md").read_text(encoding="utf-8")
    assert page == WRITER["render"](module), "run: python docs/write_api.py"
    if module != "miles_embedded.kernels.overlap":  # importing it needs Triton
        assert set(WRITER["exports"](module)) == set(import_module(module).__all__)


def test_signatures_and_first_paragraphs():
    page = (ROOT / "docs" / "api" / f"{'miles_core.plugin'}.md").read_text(encoding="utf-8")
    assert "class Rule:\n    needs: str\n    because: str\n    when: str = ''\n    hardware: bool = False\n" in page
    assert "\nA condition that a run must meet, in the grammar of `miles_core.plugin.rule`.\n" in page
    assert "def detect_fall(" in page and "    def passthrough(self, table: str) -> dict[str, Any]: ..." in page


def test_the_site_leaves_them_to_its_own_rendering():
    strip = runpy.run_path(str(ROOT / "docs" / "site.py"))["_SIGNATURES"]
    page = (ROOT / "docs" / "api" / f"{'miles_core.data'}.md").read_text(encoding="utf-8")
    assert "```" in page and "```" not in strip.sub("", page) and "::: miles_core.data\n" in strip.sub("", page)


def test_one_page_lists_what_is_public():
    listed = re.findall(r"^\| \[`([\w.]+)`\]", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == PAGES and set(PUBLIC) <= set(PAGES)
