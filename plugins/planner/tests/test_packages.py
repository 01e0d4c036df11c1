"""Planning without the plugins of the parts."""

import pytest

from miles_core.cli.plan import run as plan
from miles_core.plugin import ConfigError
from miles_planner import packages
from miles_planner.launch.command import run


@pytest.fixture
def without_parts(monkeypatch):
    """An environment that has the demo's plugins only."""
    points = [point for point in packages.entry_points(group="miles.plugins") if point.name in ("r3", "tis")]
    monkeypatch.setattr(packages, "entry_points", lambda group: points)


def test_a_search_names_one_command_that_installs_all_missing_plugins(without_parts, monkeypatch):
    monkeypatch.chdir(packages.Path(packages.__file__).parents[3])
    with pytest.raises(ConfigError) as caught:
        plan(["--search", "--hardware", "256xH200", "--hf-checkpoint", "x", "--trainer", "embedded"])
    assert str(caught.value).endswith("pip install --no-deps ./plugins/ray ./plugins/sglang")
    assert str(caught.value).startswith("--runtime ray, --engine sglang: not installed here")


def test_a_launch_file_needs_the_plugins_of_the_run(without_parts, monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "__file__", str(tmp_path / "site-packages" / "miles_planner" / "packages.py"))
    with pytest.raises(ConfigError, match=r"pip install --no-deps miles-plugin-megatron$"):
        run(["slurm", "--hardware", "2x8xH200", "--runtime=inline", "--trainer", "megatron"])


def test_the_last_value_of_an_option_counts():
    assert packages.read_option(["--engine", "embedded", "--engine=sglang"], "--engine") == "sglang"
    assert packages.read_option(["--engine-x=1", "--trainer"], "--engine") is None
    assert packages.read_option(["--trainer"], "--trainer") is None and packages.read_option([], "--trainer") is None
