import json
import re
from pathlib import Path

import pytest

from miles_core.errors import MilesError
from miles_core.plugin import discovery
from miles_tools.commands import plugins


def test_the_list_says_what_is_usable_here(f6, capsys):
    assert plugins.run(["--json", "--plugins", f6, "--hardware", "none"]) == 0
    row, *_ = json.loads(capsys.readouterr().out)
    assert (row["name"], row["hooks"], row["claims"], row["pairs"]) == ("f6", "wrap_weights", "precision", "f6xbf16")
    assert row["state"] == "active with --emulate-precision here"
    assert plugins.run(["--plugins", f6, "--hardware", "B200"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("f6 0.3  (file:") and first.endswith("active")
    assert "    summary  six-bit weights" in rest


def test_a_new_installation_has_the_backend_that_ships_with_it(f6, capsys):
    assert plugins.run([]) == 0
    assert re.search(r"^embedded \d", capsys.readouterr().out, re.MULTILINE)


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
    path.write_text(Path(f6).read_text().replace('"f6"', '"odd"').replace("gpu.sm >= 100", "gpu.smm >= 100"))
    with pytest.raises(MilesError, match=r"odd: rule 'gpu\.smm >= 100' names gpu\.smm, which nothing defines"):
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
