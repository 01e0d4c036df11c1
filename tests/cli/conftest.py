"""A plugin in one file, in an environment where nothing is installed."""

from importlib.metadata import entry_points

import pytest

from miles_core.plugin import discovery

PLUGIN = """
from miles_core.plugin.marker import hookimpl
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
"""


@pytest.fixture
def f6(tmp_path, monkeypatch):
    """A single-file plugin in an environment where nothing is installed but core."""
    own = tuple(entry_points(group="miles.plugins", name="embedded"))
    monkeypatch.setattr(discovery, "entry_points", lambda group: own)
    path = tmp_path / "f6.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture
def moe(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8, "num_hidden_layers": 2}')
    return str(tmp_path)
