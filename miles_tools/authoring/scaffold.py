"""``miles plugins new NAME``: generates a working third-party plugin.

The result is a minimal complete distribution: a manifest that imports no torch, one hook with a visible effect (or, with ``--format``, a
number format), tests, and the metadata for ``pip install -e``.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from miles_core.errors import PluginError
from miles_core.version import __version__

_PYPROJECT = """\
[build-system]
requires = ["flit_core >=3.11,<4"]
build-backend = "flit_core.buildapi"

[project]
name = "$distribution"
dynamic = ["version", "description"]
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["miles-core ~= $series"]

[project.optional-dependencies]
test = ["miles-core[test]"]

[project.entry-points."miles.plugins"]
$name = "$package:plugin"

[tool.flit.module]
name = "$package"
"""

_MANIFEST = '''\
"""$title for miles-core."""

from dataclasses import dataclass

from miles_core.plugin import Plugin, option

__version__ = "0.1.0"


@dataclass(frozen=True)
class $classname:
    """Options; each becomes a flag and a key of the table ``$name`` in a configuration file."""

    every: int = option(1, help="report every N steps", flag="--$dashed-every")


plugin = Plugin(
    name="$name",
    summary="$title",
    version=__version__,
    core="~=$series",
    config=$classname,
    hooks={"": "$package.hooks:Hooks"},
)
'''

_HOOKS = '''\
"""Where the plugin takes part in a run. Only this file may import torch."""

import time

from miles_core.plugin import hookimpl

from $package import $classname


class Hooks:
    """One metric: seconds since the last report."""

    def __init__(self, options: $classname) -> None:
        self.every = options.every
        self.steps = 0
        self.last = time.perf_counter()

    @hookimpl
    def on_step(self, metrics):
        self.steps += 1
        if self.steps % self.every == 0:
            now = time.perf_counter()
            metrics["$name/seconds"] = now - self.last
            self.last = now
'''

_README = """\
# $distribution

$title for miles-core.

```
pip install -e .
miles plugins
miles train --plugins $name ...
```

`$package/__init__.py` says what the plugin is; `$package/hooks.py` is where it takes part in a run. Every hook it could
implement is described in `miles_core.contracts.hooks`. Run the tests with `python -m pytest`.
"""

_TEST = """\
import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from miles_testing import toy_run

from $package import $classname
from $package.hooks import Hooks

INSTALLED = any(found.name == "$name" for found in entry_points(group="miles.plugins"))


def test_the_manifest_imports_no_torch():
    code = "import sys, $package; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_it_reports_its_metric_every_n_steps():
    hooks, reports = Hooks($classname(every=2)), []
    for _ in range(4):
        metrics = {}
        hooks.on_step(metrics)
        reports.append(sorted(metrics))
    assert reports == [[], ["$name/seconds"], [], ["$name/seconds"]]


@pytest.mark.skipif(not INSTALLED, reason="needs pip install -e .")
def test_a_run_logs_it():
    steps = toy_run(["$name"], steps=2, ${name}_every=2).metrics
    assert ["$name/seconds" in step for step in steps] == [False, True]
"""

_FORMAT_MANIFEST = '''\
"""$title weights for miles-core."""

from miles_formats import format_plugin

__version__ = "0.1.0"

plugin = format_plugin(
    "$name",
    "$title: whole numbers of 8 bits in blocks of 32",
    version=__version__,
    core="~=$series",
    format="$package.format:$formatname",
    format_error={"": 0.01},
)
'''

_FORMAT = '''\
"""$title: each block of 32 weights of a row is divided by its largest magnitude / 127 and rounded to whole numbers.

Everything there is to know about the format is here; trainer, engine, weight sync and ``miles convert`` call this class.
"""

import torch

from miles_formats import Format, Stored, store

BLOCK = 32


class $formatname(Format):
    """Stored as ``X.weight`` int8 [N, K] and ``X.weight_scale`` FP32 [N, K/32]; w = code * scale."""

    name = "$name"
    tile = (1, BLOCK)
    error = 0.01
    skip_origin = "--extra-high-precision-layers-hf"

    def refuse(self, shape):
        return None if shape[1] % BLOCK == 0 else f"K must be a multiple of {BLOCK}, not {shape[1]}"

    def storage(self, shape):
        rows, columns = shape
        return Stored("weight", torch.int8, shape), Stored("weight_scale", torch.float32, (rows, columns // BLOCK))

    def quantize(self, weight, stats=None, out=None):
        blocks = weight.float().reshape(len(weight), -1, BLOCK)
        amax = blocks.abs().amax(-1)
        scale = torch.div(amax.clamp(min=1e-30), torch.full_like(amax, 127.0))  # a division on every device
        codes = torch.div(blocks, scale[..., None]).round().clamp(-127, 127)
        return store({"weight": codes.to(torch.int8).reshape(weight.shape), "weight_scale": scale}, out)

    def dequantize(self, parts):
        codes, scale = parts["weight"], parts["weight_scale"]
        return (codes.reshape(*scale.shape, BLOCK).float() * scale[..., None]).reshape(codes.shape)

    def config(self, unquantized):
        return {"quant_method": self.name, "group_size": BLOCK, "modules_to_not_convert": list(unquantized)}
'''

_FORMAT_README = """\
# $distribution

$title weights for miles-core.

```
pip install -e .
miles train --rollout-$dashed --train-$dashed ...
miles convert --to $name --model-dir A --save-dir B
```

`$package/format.py` is the format, `tests/` the contract that every format passes. Run the tests with
`python -m pytest`.
"""

_FORMAT_TEST = """\
from importlib.metadata import entry_points

import pytest
import torch
from miles_testing import FormatContract, FormatPluginContract

from $package import plugin
from $package.format import $formatname

INSTALLED = any(found.name == "$name" for found in entry_points(group="miles.plugins"))


class Test$formatname(FormatContract):
    def make(self):
        return $formatname()


@pytest.mark.skipif(not INSTALLED, reason="needs pip install -e .")
class TestPlugin(FormatPluginContract):
    plugin = plugin
    sizes = {"moe_intermediate_size": 32}  # of the toy model, a multiple of the block


def test_known_codes():
    weight = torch.zeros(1, 32)
    weight[0, :4] = torch.tensor([127.0, -127.0, 2.5, 0.4])  # half-way goes to the even number
    parts = $formatname().quantize(weight)
    assert parts["weight"][0, :4].tolist() == [127, -127, 2, 0] and parts["weight_scale"].item() == 1
"""

_CONFTEST = '''\
"""Lets the tests run before the distribution is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
'''


def write_plugin(name: str, directory: Path | None = None, format: bool = False) -> list[Path]:
    """Write a plugin distribution.

    Args:
        name: plugin name for ``--plugins``: lower-case letters, digits and ``_``.
        directory: where to write, by default ``./miles-plugin-NAME``; it must be empty or absent.
        format: generate a number format instead of a hook.

    Returns:
        the files written, in reading order.

    Raises:
        PluginError: the name is not a valid package name, or the directory is not empty.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name == "core":
        raise PluginError(f"{name!r} cannot name a plugin: use lower-case letters, digits and _, e.g. my_format")
    dashed = name.replace("_", "-")
    directory = directory or Path(f"miles-plugin-{dashed}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PluginError(f"{directory} exists and is not empty; choose another with --dir")
    words = {
        "name": name,
        "dashed": dashed,
        "package": f"miles_{name}",
        "distribution": f"miles-plugin-{dashed}",
        "classname": "".join(part.capitalize() for part in name.split("_")) + "Config",
        "formatname": "".join(part.capitalize() for part in name.split("_")),
        "title": name.replace("_", " ").capitalize(),
        "series": ".".join(__version__.split(".")[:2]),
    }
    package = directory / words["package"]
    readme, manifest, inside, text, test = (
        (_FORMAT_README, _FORMAT_MANIFEST, "format.py", _FORMAT, _FORMAT_TEST)
        if format
        else (_README, _MANIFEST, "hooks.py", _HOOKS, _TEST)
    )
    files = {
        directory / "README.md": readme,
        directory / "pyproject.toml": _PYPROJECT,
        package / "__init__.py": manifest,
        package / inside: text,
        directory / "conftest.py": _CONFTEST,
        directory / "tests" / f"test_{name}.py": test,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(text).substitute(words), encoding="utf-8")
    return list(files)
