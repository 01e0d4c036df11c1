"""Mistakes in a manifest give one-line errors, and a plugin that was not requested stops no command."""

import re

import pytest

from miles_core.cli.main import main
from miles_core.config.load import load
from miles_core.errors import PluginError
from miles_core.plugin.declared import find_mistakes
from miles_core.plugin.discovery import discover
from miles_core.plugin.manifest import Plugin, Rule

RIVAL = """
from dataclasses import dataclass
from miles_core.plugin.options import option
from miles_core.plugin.manifest import Plugin

@dataclass(frozen=True)
class Options:
    \"\"\"Options.\"\"\"
    size: {type} = option({default}, flag="--rival-size", help="the size")

plugin = Plugin("{name}", "a rival", "0.1", "~=0.1", config=Options)
"""


def make_plugin(**changes):
    return list(find_mistakes(Plugin(**{"name": "mine", "summary": "s", "version": "0", "core": ">=0", **changes})))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"requires": Rule("model.moe", "b")},
            "its requires is Rule.*must be tuple of Rule; a tuple of one needs a comma",
        ),
        ({"hooks": "H"}, "its hooks is 'H', and must be mapping of str to str or tuple of str"),
        ({"provides": {"engin": {"x": "m:f"}}}, "it provides 'engin', which core does not use; did you mean engine"),
        ({"requires": (Rule("model.moe", " "),)}, "the rule 'model.moe' has no reason"),
        ({"claims": {"precision": ""}}, "the claim 'precision' has no reason"),
        ({"name": "Bad Name"}, "its name 'Bad Name' must be letters"),
    ],
    ids=["comma", "hooks", "kind", "reason", "claim", "name"],
)
def test_a_slip_is_named(changes, says):
    (found,) = make_plugin(**changes)
    assert re.search(says, found), found


def test_a_right_one_has_none():
    assert make_plugin(provides={"scorer": {"x": "m:f"}}, requires=(Rule("model.moe", "only experts"),)) == []


def test_rivals_for_a_flag_are_told_apart_by_what_was_asked_for(install, capsys, tmp_path):
    install("one", RIVAL.format(name="one", type="int", default=1))
    install("two", RIVAL.format(name="two", type="str", default="'a'"))
    assert load(["--rival-size", "5", "--plugins", "one"]).plugin("one").size == 5
    assert load(["--rival-size", "x", "--plugins", "two"]).plugin("two").size == "x"
    assert main(["plan"]) == 0
    capsys.readouterr()
    assert main(["plugins"]) == 0
    shown = capsys.readouterr().out
    assert "broken: two (miles-plugin-two 0.1.0): --rival-size is declared by one" in shown
    with pytest.raises(PluginError, match=r"--rival-size is declared by one \(one.size\) and by two"):
        load(["--plugins", "one,two"])
    assert "two" in discover()
