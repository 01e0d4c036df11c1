"""Adapters of peft with which training cannot continue are refused from their configuration."""

import json

import peft
import pytest
import torch

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
        (PLAIN | {"alora_invocation_tokens": [5, 7]}, "of the kind LORA with alora_invocation_tokens"),
        (PLAIN | {"kasa_config": {"beta": 0.1}}, "of the kind LORA with kasa_config"),
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


@pytest.mark.parametrize("initial", [True, False, "gaussian", "orthogonal", "pissa", "pissa_niter_2", "olora", "OLoRA"])
def test_an_adapter_of_base_weights_that_peft_changed_is_refused(tmp_path, initial):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6))
    before = model[0].weight.detach().clone()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights=initial)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path)
    options = LoraOptions(rank=4, alpha=8.0)
    if torch.equal(adapted.base_model.model[0].base_layer.weight, before):
        check_adapter(str(tmp_path), options, "base")
    else:
        with pytest.raises(
            ConfigError, match=f"its init_lora_weights is {initial}, so it belongs to base weights that peft changed"
        ):
            check_adapter(str(tmp_path), options, "base")


@pytest.mark.parametrize("initial", ["corda", "loftq", "lora_ga"])  # which need data, or scipy
def test_an_adapter_of_base_weights_that_depend_on_data_is_refused(tmp_path, initial):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PLAIN | {"init_lora_weights": initial}))
    with pytest.raises(
        ConfigError, match=f"its init_lora_weights is {initial}.*path_initial_model_for_weight_conversion"
    ):
        check_adapter(str(tmp_path), LoraOptions(rank=4, alpha=8.0), "base")
