"""Adapters of peft with which training cannot continue are refused from their configuration."""

import json

import pytest

from miles_core.plugin import ConfigError
from miles_lora import LoraOptions
from miles_lora.peft_files import check_adapter

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": False}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (PLAIN | {"peft_type": "IA3"}, "of the kind IA3; this plugin trains plain LoRA"),
        (PLAIN | {"use_dora": True}, "of the kind DORA"),
        (PLAIN | {"modules_to_save": ["lm_head"]}, "of the kind LORA with modules_to_save"),
        (PLAIN | {"alpha_pattern": {"q_proj": 32}}, "of the kind LORA with alpha_pattern"),
        (PLAIN | {"use_rslora": True}, "its use_rslora is True, but this run has --no-lora-use-rslora"),
        ([PLAIN], "adapter_config.json holds a list instead of an object"),
    ],
)
def test_a_configuration_that_training_cannot_continue(tmp_path, config, why):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=why):
        check_adapter(str(tmp_path), LoraOptions(rank=4, alpha=8.0), "base")


def test_a_configuration_with_the_same_options(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | {"alpha_pattern": {}, "modules_to_save": None}))
    check_adapter(str(tmp_path), LoraOptions(rank=4, alpha=8.0), "base")
