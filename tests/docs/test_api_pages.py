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
    assert "def above(" in page and "    def passthrough(self, table: str) -> dict[str, Any]: ..." in page


def test_the_site_leaves_them_to_its_own_rendering():
    strip = runpy.run_path(str(ROOT / "docs" / "site.py"))["_SIGNATURES"]
    page = (ROOT / "docs" / "api" / f"{'miles_core.data'}.md").read_text(encoding="utf-8")
    assert "```" in page and "```" not in strip.sub("", page) and "::: miles_core.data\n" in strip.sub("", page)


def test_one_page_lists_what_is_public():
    listed = re.findall(r"^\| \[`([\w.]+)`\]", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == PAGES and set(PUBLIC) <= set(PAGES)


def test_every_public_name_has_a_role_and_a_line():
    public = [(module, name, home) for module in PAGES for name, home in WRITER["exports"](module).items()]
    assert [f"{m}:{n}" for m, n, home in public if not WRITER["roles_of"](n, m, home)] == []
    assert [f"{m}:{n}" for m, n, home in public if not WRITER["summarize"](n, home)] == []
    assert WRITER["names_page"]() == WRITER["NAMES"].read_text(encoding="utf-8"), "run: python docs/write_api.py"


def test_the_roles_are_those_of_names_that_exist():
    table = WRITER["ROLES"]
    public = {f"{module}:{name}": home for module in PAGES for name, home in WRITER["exports"](module).items()}
    assert [name for name in table["names"] if name not in public] == []
    unused = [m for m in table["modules"] if not any(f"{home}.".startswith(f"{m}.") for home in public.values())]
    assert unused == []
    assert {role for given in (*table["modules"].values(), *table["names"].values()) for role in given} == set(
        table["roles"]
    )
