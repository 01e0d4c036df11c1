"""A checkpoint with code of its own: what is exported loads as it did."""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_core.errors import CheckpointError
from miles_embedded.model.export import export_checkpoint
from miles_embedded.model.load import load_model
from miles_testing import tiny_checkpoint

CONFIGURATION = """
from transformers import Qwen3Config

class OwnConfig(Qwen3Config):
    model_type = "own_qwen3"
"""
MODELING = """
from transformers import Qwen3ForCausalLM
from .configuration_own import OwnConfig
from .scales_own import SCALE

class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig

    def scale(self):
        return SCALE
"""
MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


@pytest.fixture
def own(tmp_path):
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "own")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"model_type": "own_qwen3", "auto_map": MAP}))
    (checkpoint / "configuration_own.py").write_text(CONFIGURATION)
    (checkpoint / "modeling_own.py").write_text(MODELING)
    (checkpoint / "unrelated.py").write_text("raise RuntimeError")
    (checkpoint / "scales_own.py").write_text("SCALE = 2\n")
    return checkpoint


def test_an_export_of_remote_code_loads_by_itself(own, tmp_path):
    model = load_model(own, "float32", trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules")
    export_checkpoint(model, None, tmp_path / "export")
    found = {str(p.relative_to(tmp_path / "export")) for p in (tmp_path / "export").rglob("*.py")}
    assert found == {"configuration_own.py", "modeling_own.py", "scales_own.py"}
    shutil.move(own, tmp_path / "gone")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)
    assert again.scale() == 2 and type(again).__name__ == "OwnForCausalLM"
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    export_checkpoint(load_model(tmp_path / "export", "float32", trust_remote_code=True), None, tmp_path / "second")
    assert load_model(tmp_path / "second", trust_remote_code=True).scale() == 2


def test_without_trust_an_export_names_no_code(own, tmp_path):
    """A checkpoint whose type Transformers has itself, next to code of its own (as DeepSeek-V3's)."""
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    model = load_model(own, "float32")
    assert type(model).__module__.startswith("transformers.")
    export_checkpoint(model, None, tmp_path / "export")
    assert not list((tmp_path / "export").rglob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "export" / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path / "export", trust_remote_code=True)


def test_code_of_another_repository_stays_there_and_a_missing_module_is_named(own, tmp_path):
    model = load_model(own, "float32", trust_remote_code=True)
    config = json.loads((own / "config.json").read_text())
    elsewhere = {**MAP, "AutoModel": "someone/else--modeling_other.Other"}
    (own / "config.json").write_text(json.dumps(config | {"auto_map": elsewhere}))
    model.config.auto_map = elsewhere
    export_checkpoint(model, None, tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text())["auto_map"] == elsewhere
    (own / "modeling_own.py").unlink()
    with pytest.raises(CheckpointError, match=re.escape(f"modeling_own.py, which is missing in {own}")):
        export_checkpoint(model, None, tmp_path / "other")
    assert not (tmp_path / "other").exists()
