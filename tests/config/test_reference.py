from __future__ import annotations

from pathlib import Path

from miles_core.config.reference import page


def test_the_page_in_the_repository_is_up_to_date():
    written = (Path(__file__).parents[2] / "docs" / "flags.md").read_text()
    assert written == page(), "run: python -m miles_core.config.reference > docs/flags.md"


def test_a_plugins_page_has_its_options_and_short_forms_only(manifests):
    text = page(manifests, ["small"])
    assert "`small.group_size`" in text and "`--rollout-small`: rollout.precision = small" in text
    assert "--lr" not in text and "--replay-buffer-size" not in text
