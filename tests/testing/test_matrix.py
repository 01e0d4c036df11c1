"""``miles plugins matrix``: outcomes of pairs, the file they are stored in, and the page in the documentation."""

import json
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from miles_core.errors import PluginError
from miles_core.plugin.discovery import discover
from miles_core.plugin.manifest import Plugin, Rule
from miles_testing import matrix, matrix_command
from miles_tools.commands import plugins

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "compatibility.jsonl"
PAGE = STORED.with_suffix(".md")
#: Stored outcomes that each commit tries again: of toy runs, and of plans.
RUNS, PLANS = 3, 8


def make_manifest(name, **more):
    return Plugin(name, f"{name}, of a test", "1.0", "~=0.1", **more)


@pytest.fixture
def two(monkeypatch):
    """Two plugins are installed, and what came of them depends on the test."""
    manifests = {name: make_manifest(name) for name in ("left", "right")}
    monkeypatch.setattr(matrix_command, "discover", lambda: manifests)
    return manifests


def test_the_page_is_written_from_the_stored_outcomes_of_every_installed_pair():
    stored = matrix.read(STORED)
    command = "miles plugins matrix --save docs/compatibility.jsonl --markdown > docs/compatibility.md"
    wanted = sorted(matrix.list_combinations(discover()))
    assert sorted(tuple(each.plugins) for each in stored) == wanted, f"run: {command}"
    assert PAGE.read_text(encoding="utf-8") == matrix_command.render(stored).rstrip() + "\n", f"run: {command}"
    assert [each.text for each in stored if each.result == "fails"] == []


def test_a_part_of_the_stored_outcomes_is_tried_for_each_commit():
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    chosen = random.Random(done.stdout)
    stored = matrix.read(STORED)
    runs = [each for each in stored if each.result == "works"]
    plans = [each for each in stored if each.result != "works"]
    for before in chosen.sample(runs, RUNS) + chosen.sample(plans, min(PLANS, len(plans))):
        now = matrix.attempt(tuple(before.plugins), discover())
        assert (now.result, now.reason) == (before.result, before.reason), f"{now.title}: {now.text}"


def test_a_third_party_that_needs_options_runs_with_those_of_its_manifest(install):
    code = """
from dataclasses import dataclass
from miles_core.plugin import Plugin, Rule, option

@dataclass(frozen=True, kw_only=True)
class Options:
    size: int = option(0, flag="--picky-size", help="a size")

plugin = Plugin("picky", "needs a size", "0.1.0", "~=0.1", config=Options{toy},
                requires=(Rule("picky.size > 0", "it divides by its size"),))
"""
    install("picky", code.replace("{toy}", ', toy={"picky_size": 2}'))
    assert matrix.attempt(("picky",), discover()).result == "works"
    install("fussy", code.replace("{toy}", "").replace("picky", "fussy"))
    refused = matrix.attempt(("fussy",), discover())
    assert refused.result == "refused" and "it divides by its size" in refused.reason


def test_a_plugin_that_breaks_the_run_fails_and_the_next_pair_is_tried(install):
    hooks = """
from miles_core.plugin import hookimpl

class Hooks:
    @hookimpl
    def on_start(self, run):
        raise ValueError("broken on purpose")
"""
    manifest = 'from miles_core.plugin import Plugin\nplugin = Plugin("bad", "breaks", "0.1.0", "~=0.1", hooks={"": "miles_test_bad.hooks:Hooks"})'
    install("bad", manifest, hooks)
    first, second = matrix.attempt_all([("bad",), ("tis",)], discover())
    assert first.result == "fails" and "broken on purpose" in first.reason
    assert second.result == "works" and 0 <= second.gap < 1e-3


def test_pairs_of_one_plugin_and_among_several():
    manifests = {name: make_manifest(name) for name in "abc"} | {"all": make_manifest("all", standard=True)}
    assert len(matrix.list_combinations(manifests)) == 6
    assert matrix.list_combinations(manifests, ["b"]) == [("b",), ("a", "b"), ("b", "c")]
    assert matrix.list_combinations(manifests, ["a", "c"]) == [("a",), ("c",), ("a", "c")]
    with pytest.raises(PluginError, match="--only a,d: there is no plugin d; plugins are a, b, c"):
        matrix.list_combinations(manifests, ["a", "d"])


def test_tables_of_two_plugins_are_united_and_models_are_made():
    manifests = {
        "a": make_manifest("a", toy={"policies": {"one": {}}, "size": 1}),
        "b": make_manifest("b", toy={"policies": {"two": {"hf_checkpoint": "{model}"}}}),
    }
    options = matrix.toy_options("ab", manifests)
    assert options["size"] == 1 and options["policies"].keys() == {"one", "two"}
    assert (Path(options["policies"]["two"]["hf_checkpoint"]) / "config.json").is_file()


def test_stored_outcomes_are_not_tried_again_unless_a_version_changed(two, monkeypatch, tmp_path, capsys):
    tried = []

    def attempt(names, manifests, pair=None):
        tried.append(names)
        return matrix.Outcome({n: manifests[n].version for n in names}, "bf16xbf16", "works", gap=1e-7)

    monkeypatch.setattr(matrix, "attempt", attempt)
    file = tmp_path / "m.jsonl"
    assert plugins.run(["matrix", "--save", str(file)]) == 0
    assert tried == [("left",), ("right",), ("left", "right")]
    assert "3 combinations: 3 work, 0 are accepted by the plan" in capsys.readouterr().out
    two["right"] = replace(two["right"], version="1.1")
    file.write_text(file.read_text() + '{"plugins": {"gone": "1"}, "precision": "bf16xbf16", "result": "works"}\n{"plu')
    assert plugins.run(["matrix", "--save", str(file), "--only", "right"]) == 0
    assert tried[3:] == [("right",), ("left", "right")]
    assert [list(each.plugins) for each in matrix.read(file)] == [["left"], ["right"], ["left", "right"]]


def test_a_file_of_something_else_is_refused_and_unchanged(two, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("my notes\nin two lines\n")
    with pytest.raises(PluginError, match=r"notes\.txt line 1 is not an outcome of miles plugins matrix"):
        plugins.run(["matrix", "--save", str(file)])
    assert file.read_text() == "my notes\nin two lines\n"


def test_failures_decide_the_exit_status_and_are_in_the_page(two, monkeypatch, capsys):
    def attempt(names, manifests, pair=None):
        bad = len(names) == 2
        versions = dict.fromkeys(names, "1.0")
        return matrix.Outcome(versions, "bf16xbf16", "fails" if bad else "works", "no | way" if bad else "", gap=2e-3)

    monkeypatch.setattr(matrix, "attempt", attempt)
    assert plugins.run(["matrix", "--markdown"]) == 1
    page, progress = capsys.readouterr()
    assert "| left + right | no / way |" in page and "| left | 2e-03 |  |" in page
    assert "[3/3, 0 s left] left + right: fails" in progress
    assert plugins.run(["matrix", "--json", "--only", "left,right"]) == 1
    assert len(json.loads(capsys.readouterr().out)) == 3


def test_two_refusals_with_one_reason_are_one_row():
    outcomes = [matrix.Outcome({"a": "1", name: "1"}, "fp8xbf16", "refused", "why") for name in "bc"]
    assert "| a + b (fp8xbf16), a + c (fp8xbf16) | why |" in matrix_command.render(outcomes)


def test_the_reasons_of_a_plan_are_in_one_line(plan):
    rule = Rule("gpu.sm >= 100", "it needs Blackwell")
    from miles_core.errors import PlanError
    from miles_core.plugin.problem import Problem

    twice = (Problem("a", rule.needs, rule.because), Problem("a", rule.needs, rule.because))
    assert matrix.reason_of(PlanError("text", twice)) == "a needs gpu.sm >= 100: it needs Blackwell"
    assert matrix.reason_of(PlanError("first\nsecond")) == "first"
