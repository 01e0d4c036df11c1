from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_core.plugin.manifest import Plugin
from miles_core.plugin.options import option
from miles_tools.authoring.flags import page, standard


def test_the_page_in_the_repository_is_up_to_date():
    written = (Path(__file__).parents[3] / "docs" / "flags.md").read_text()
    assert written == page(standard()), "run: python -m miles_tools.authoring.flags > docs/flags.md"


@dataclass(frozen=True)
class Small:
    """Options of the pretend number format small."""

    group_size: int = option(128, help="values per scale")


def test_a_plugins_page_has_its_options_and_short_forms_only():
    small = Plugin(
        "small",
        "",
        "1",
        ">=0",
        config=Small,
        aliases={"--rollout-small": {"rollout.precision": "small"}},
        formats={"small": "m:F"},
    )
    text = page([small], ["small"])
    assert "`small.group_size`" in text and "`--rollout-small`: rollout.precision = small" in text
    assert "--lr" not in text
