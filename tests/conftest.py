"""Fixtures of several folders: checkpoints, an installed number format, a plugin in one file, installed plugins."""

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miles_core.plugin import discovery
from miles_formats.convert import installed
from miles_testing.doubles.pair_format import PLUGIN

# ``published_manifests`` is importable in ``--import-mode=importlib``
sys.path.insert(0, str(Path(__file__).parent / "plugin"))

SINGLE_FILE = """
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
def pair8(monkeypatch):
    """The double is the only format that is installed."""
    monkeypatch.setattr(installed, "discover", lambda: {PLUGIN.name: PLUGIN})


@pytest.fixture
def checkpoint(tmp_path):
    """Writes ``{file: {name: tensor}}`` as a checkpoint; ``config`` are entries of its config.json."""

    def write(files, name="bf16", **config):
        directory = tmp_path / name
        directory.mkdir()
        for file, tensors in files.items():
            save_file(tensors, directory / file, metadata={"format": "pt"})
        if len(files) > 1:
            home = {n: file for file, tensors in files.items() for n in tensors}
            index = {"metadata": {"total_size": 0}, "weight_map": home}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "dtype": "bfloat16", **config}))
        (directory / "tokenizer.json").write_text("{}")
        return directory

    return write


@pytest.fixture
def weight():
    """A random matrix in BF16, different at every call."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, generator=generator).to(dtype)

    return make


@pytest.fixture
def tensors(weight):
    """A layer of a dense model."""
    return {
        "model.embed_tokens.weight": weight(16, 8),
        "model.layers.0.mlp.gate_proj.weight": weight(12, 8),
        "model.layers.0.mlp.up_proj.weight": weight(12, 8) * 3,
        "model.layers.0.mlp.down_proj.weight": weight(8, 12),
        "model.layers.0.input_layernorm.weight": weight(8),
        "model.layers.0.self_attn.q_proj.weight": weight(8, 8),
        "model.layers.0.self_attn.q_proj.bias": weight(8),
        "lm_head.weight": weight(16, 8),
    }


@pytest.fixture
def f6(tmp_path, monkeypatch):
    """A single-file plugin in an environment where nothing is installed but core."""
    own = tuple(
        p
        for n in ("embedded", "formats", "bundled", "sinks", "replay", "workers")
        for p in entry_points(group="miles.plugins", name=n)
    )
    monkeypatch.setattr(discovery, "entry_points", lambda group: own)
    path = tmp_path / "f6.py"
    path.write_text(SINGLE_FILE)
    return str(path)


@pytest.fixture
def moe(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8, "num_hidden_layers": 2}')
    return str(tmp_path)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(name, code, distribution=...)`` puts a plugin's package and metadata on ``sys.path``."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def write(name, code, hooks="", distribution=None, version="0.1.0", package=None, requires=()):
        distribution, package = distribution or f"miles-plugin-{name}", package or f"miles_test_{name}"
        folder = tmp_path / "site" / package
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(code)
        if hooks:
            (folder / "hooks.py").write_text(hooks)
        info = tmp_path / "site" / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        (info / "entry_points.txt").write_text(f"[miles.plugins]\n{name} = {package}:plugin\n")
        monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.delitem(sys.modules, f"{package}.hooks", raising=False)

    return write
