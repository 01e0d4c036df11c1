"""The options: made from the table, which is made from Megatron-Core's source."""

import json
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_megatron.config import MegatronConfig, table
from miles_megatron.regenerate import NOT_OPTIONS, rows, why_not
from miles_testing import plan

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
needs_megatron = pytest.mark.skipif(not INSTALLED, reason="needs megatron-core")


def source():
    return Path(find_spec("megatron.core").submodule_search_locations[0])


@needs_megatron
def test_the_table_is_that_of_the_installed_version():
    assert rows(source()) == table()


@needs_megatron
def test_every_option_is_read_somewhere():
    """A field that only its own definition mentions would be a flag that does nothing."""
    text = "\n".join(
        p.read_text(encoding="utf-8")
        for folder in ("transformer", "models", "optimizer", "distributed", "tensor_parallel", "extensions")
        for p in (source() / folder).rglob("*.py")
        if not p.name.endswith("_config.py")
    )
    text += "".join((source() / n).read_text() for n in ("parallel_state.py", "recompute.py", "utils.py"))
    text += (source() / "transformer" / "transformer_config.py").read_text().partition("def __post_init__")[2]
    unread = [r["name"] for r in table() if f".{r['name']}" not in text and f'"{r["name"]}"' not in text]
    assert unread == []


def test_what_decides_the_model_is_no_option():
    names = {f.name for f in fields(MegatronConfig)}
    assert {"tensor_model_parallel_size", "recompute_granularity", "sequence_parallel", "exp_avg_dtype"} <= names
    assert not names & {"hidden_size", "num_layers", "hidden_dropout", "fp16", "finalize_model_grads_func"}
    assert why_not("hidden_size") == NOT_OPTIONS[next(p for p in NOT_OPTIONS if "hidden_size" in p)]


def test_a_new_kind_of_field_must_be_decided_on(tmp_path):
    file = tmp_path / "model_parallel_config.py"
    for name in ("transformer/transformer_config.py", "optimizer/optimizer_config.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed/distributed_data_parallel_config.py").write_text("")
    file.write_text("class ModelParallelConfig:\n    brand_new: int = 3\n    other: Callable = None\n")
    with pytest.raises(ValueError, match="other: flags do not support the type Callable"):
        rows(tmp_path)
    file.write_text("class ModelParallelConfig:\n    brand_new: Optional[Literal['a', 'b']] = None\n")
    assert [r["choices"] for r in rows(tmp_path)] == [["a", "b"]]


def test_values_are_checked_before_anything_is_imported(tmp_path):
    with pytest.raises(ConfigError, match="recompute_granularity"):
        plan(trainer="megatron", recompute_granularity="some")
    with pytest.raises(ConfigError, match="tensor_model_parallel_size"):
        plan(trainer="megatron", tensor_model_parallel_size=0)


@pytest.mark.parametrize("version", ["0.16.1", "none"])
def test_missing_packages_are_named_with_their_versions(version):
    wanted = rf"megatron-core >=0\.19\.2,<0\.20\n.*= {version} (.|\n)*because megatron-core .*: pip install"
    with pytest.raises(PlanError, match=wanted):
        plan(trainer="megatron", facts=[f"package.megatron-core={version}"])


def test_help_imports_neither_torch_nor_megatron():
    code = "import sys, json, miles_megatron, miles_megatron.review; print(json.dumps([m for m in ('torch', 'megatron') if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
