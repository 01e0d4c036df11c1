import json

import pytest

from miles_core.cli import plan, plugins
from miles_core.errors import MilesError
from miles_core.plugin import discovery

PLUGIN = '''
from miles_core.plugin.hooks import hookimpl
from miles_core.plugin.manifest import Pair, Plugin, Rule

plugin = Plugin(
    "f6",
    "six-bit weights",
    "0.3",
    "~=0.1",
    hooks={"": "Hooks"},
    formats={"f6": "Format"},
    pairs=(Pair("f6", "bf16", (Rule("gpu.sm >= 100", "six bits need Blackwell", hardware=True),)),),
    claims={"precision": "one format a run"},
    requires=(Rule("model.moe", "only experts are packed", when="rollout.precision == f6"),),
)


class Format:
    pass


class Hooks:
    @hookimpl
    def wrap_weights(self, run, policy):
        return None
'''


@pytest.fixture
def f6(tmp_path, monkeypatch):
    """A single-file plugin in an environment where nothing else is installed."""
    monkeypatch.setattr(discovery, "entry_points", lambda group: ())
    path = tmp_path / "f6.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture
def moe(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8, "num_hidden_layers": 2}')
    return str(tmp_path)


def test_a_plan_is_printed_with_facts_origins_and_chains(f6, moe, capsys):
    argv = ["--plugins", f6, "--rollout-precision", "f6", "--hf-checkpoint", moe, "--hardware", "B200"]
    assert plan.run(argv) == 0
    text = capsys.readouterr().out
    for line in (
        "  gpu.sm = 100 (--fact gpu=B200)",
        "  model.moe = true (config.json: num_experts=8)",
        "  rollout.precision = f6 (--rollout-precision f6)",
        "  wrap_weights: core <- f6 (outermost)",
    ):
        assert line in text.splitlines(), (line, text)
    assert text.startswith("miles-core 0.1.0, plugins: f6 0.3 (plan ")


def test_json_is_the_plan_itself(f6, capsys):
    from miles_core.plugin.plan import Plan

    assert plan.run(["--json", "--plugins", f6]) == 0
    printed = Plan.from_json(capsys.readouterr().out)
    assert printed.order == ("f6",)
    assert printed.plugins[0].source.startswith(f"file:{f6} sha256:")


def test_all_reasons_come_at_once(f6, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    argv = ["--plugins", f6, "--rollout-precision", "f6", "--hf-checkpoint", str(tmp_path), "--hardware", "H200"]
    with pytest.raises(MilesError) as refused:
        plan.run(argv)
    text = str(refused.value)
    assert "this run cannot start (2 problems)" in text
    assert "because only experts are packed" in text and "because six bits need Blackwell" in text


def test_the_hint_to_emulate_works_when_followed(f6, moe, capsys):
    argv = ["--plugins", f6, "--rollout-precision", "f6", "--hf-checkpoint", moe, "--hardware", "none"]
    with pytest.raises(MilesError, match="    --emulate-precision"):
        plan.run(argv)
    assert plan.run([*argv, "--emulate-precision"]) == 0
    assert "emulated: f6 rollout x bf16 train needs gpu.sm >= 100" in capsys.readouterr().out


def test_a_wrong_fact_is_refused(f6):
    with pytest.raises(MilesError, match="there is no fact 'gpu.smm'; did you mean gpu.sm"):
        plan.run(["--fact", "gpu.smm=90"])


def test_the_list_says_what_is_usable_here(f6, capsys):
    assert plugins.run(["--json", "--plugins", f6, "--hardware", "none"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["hooks"], row["claims"], row["pairs"]) == ("f6", "wrap_weights", "precision", "f6xbf16")
    assert row["state"] == "active with --emulate-precision here"
    assert plugins.run(["--plugins", f6, "--hardware", "B200"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("f6 0.3  (file:") and first.endswith("active")
    assert "    summary  six-bit weights" in rest


def test_an_empty_list_says_how_to_begin(f6, capsys):
    assert plugins.run([]) == 0
    assert capsys.readouterr().out == "no plugin is installed; for example: pip install miles-plugin-tis\n"


def test_a_broken_plugin_is_listed_with_its_reason(monkeypatch, capsys):
    from importlib.metadata import EntryPoint

    point = EntryPoint("sad", "not_there_at_all:plugin", discovery.GROUP)
    monkeypatch.setattr(discovery, "entry_points", lambda group: (point,))
    assert plugins.run(["--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["state"].startswith("broken: plugin 'sad'") and "not_there_at_all" in row["state"]


def test_check_resolves_without_running(f6, capsys):
    assert plugins.run(["check", "--plugins", f6]) == 0
    assert "ok: miles-core 0.1.0, plugins: f6 0.3" in capsys.readouterr().out


def test_check_finds_mistakes_of_a_manifest(tmp_path, f6):
    path = tmp_path / "odd.py"
    path.write_text(PLUGIN.replace('"f6"', '"odd"').replace("gpu.sm >= 100", "gpu.smm >= 100"))
    with pytest.raises(MilesError, match="odd: rule 'gpu.smm >= 100' names gpu.smm, which nothing defines"):
        plugins.run(["check", "--plugins", str(path)])


def test_explain_tells_each_constraint(f6, capsys):
    assert plugins.run(["explain", f6, "--hardware", "H200"]) == 0
    text = capsys.readouterr().out
    assert "      because six bits need Blackwell" in text
    assert "here it does not hold; --emulate-precision runs the same numerics without it: gpu.sm = 90" in text


def test_new_writes_a_plugin(tmp_path, capsys):
    assert plugins.run(["new", "mine", "--dir", str(tmp_path / "made")]) == 0
    text = capsys.readouterr().out
    assert str(tmp_path / "made" / "miles_mine" / "hooks.py") in text and "next: pip install -e" in text
