"""Snippets of the miles documentation: none fails, and the page of them is current."""

import runpy
from pathlib import Path

WRITER = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "write_seeds.py"))


def test_no_snippet_fails_and_the_page_is_current():
    found = WRITER["results"]()
    assert [(entry.source, reason) for entry, result, reason in found if result == "fails"] == []
    assert WRITER["PAGE"].read_text(encoding="utf-8") == WRITER["render"](found), "run: python docs/write_seeds.py"


def test_a_refusal_without_its_expected_reason_fails(tmp_path):
    WRITER["write_models"](tmp_path)
    entry = WRITER["Entry"]("here: 1", "--rollout-fp8", hardware="A100", refused="another reason")
    assert WRITER["outcome"](entry, tmp_path)[0] == "fails"
