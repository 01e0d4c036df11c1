"""SGLang imports the modules of the model that it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_sglang.architectures import installed_models
from miles_sglang.model_modules import VARIABLE, environment

MODULES = {
    "__init__": "",
    "qwen3": "class Qwen3ForCausalLM: ...\nEntryClass = Qwen3ForCausalLM",
    "qwen3_moe": "from sglang.srt.models.qwen3 import Attention\nclass Qwen3MoeForCausalLM: ...\nEntryClass = Qwen3MoeForCausalLM",
    "mixtral": "class MixtralForCausalLM: ...",
    "mixtral_quant": "class QuantMixtralForCausalLM: ...",
    "llava": "class LlavaForConditionalGeneration: ...",
    "transformers": "class TransformersForCausalLM: ...",
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def model(tmp_path: Path, *architectures: str) -> dict[str, Any]:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": list(architectures)}))
    return {"model_path": str(tmp_path)}


def test_the_modules_of_the_model_and_of_transformers_are_left(tmp_path: Path, models: Path) -> None:
    found = environment(model(tmp_path, "Qwen3MoeForCausalLM"), models)
    assert found == {VARIABLE: "llava,mixtral,mixtral_quant,qwen3"}
    found = environment(model(tmp_path, "MixtralForCausalLM"), models)  # SGLang renames it if its weights are quantised
    assert found == {VARIABLE: "llava,qwen3,qwen3_moe"}


def test_all_modules_stay_where_another_may_be_needed(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen = model(tmp_path, "Qwen3ForCausalLM")
    assert environment(qwen, models)
    assert not environment(qwen | {"speculative_algorithm": "EAGLE"}, models)
    assert not environment(qwen | {"model_impl": "transformers"}, models)
    assert not environment({"model_path": "Qwen/Qwen3-8B"}, models)
    monkeypatch.setenv(VARIABLE, "llava")
    assert not environment(qwen, models)
    monkeypatch.delenv(VARIABLE)
    for name in ("LlavaForConditionalGeneration", "OtherForCausalLM"):
        assert not environment(model(tmp_path, name), models)


def test_the_installed_sglang_reads_the_variable() -> None:
    folder = installed_models()
    if folder is None:
        pytest.skip("SGLang is not installed")
    assert f"envs.{VARIABLE}" in (folder / "registry.py").read_text()
