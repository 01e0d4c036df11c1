"""Entries of ``config.json`` that change what a model computes: the plan refuses what Megatron-Core's model would not compute."""

import pytest

from miles_core.plugin import CheckpointError
from miles_megatron import families
from miles_megatron.config_keys import find_foreign, layer_windows
from miles_megatron.families import FAMILIES


def test_a_tiny_and_a_default_configuration_of_each_family_is_accepted(family, config_of):
    from transformers import CONFIG_MAPPING

    assert not list(find_foreign(config_of(family)))
    assert not list(find_foreign(CONFIG_MAPPING[family]().to_dict()))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"logit_scale": 0.25},
        {"logits_scaling": 4.0},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"embedding_multiplier": 2.0},
        {"residual_multiplier": 0.5},
        {"attention_multiplier": 0.3},
        {"query_pre_attn_scalar": 16},
        {"use_parallel_residual": True},
        {"position_embedding_type": "alibi"},
        {"clip_qkv": 8.0},
        {"no_rope_layers": [1, 0]},
        {"attention_chunk_size": 64},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
        {"zero_centered_rmsnorm_gate": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_the_model_does_not_compute_is_refused_with_entry_and_value(family, config_of, change):
    if family == "smollm3" and "no_rope_layers" in change:  # it has such layers, and so does Megatron-Core
        assert families.read({**config_of(family), **change}).rotary.skipped == (False, True)
        return
    with pytest.raises(CheckpointError, match=rf"{next(iter(change))}.*use --trainer embedded"):
        families.read({**config_of(family), **change})


@pytest.mark.parametrize(
    ("one", "change"),
    [
        *((f, {"attention_bias": True}) for f in ("llama", "qwen3", "qwen3_moe", "deepseek_v3")),
        *((f, {"partial_rotary_factor": 0.5}) for f in ("llama", "qwen2", "qwen3_moe", "mixtral")),
        ("gpt_oss", {"swiglu_limit": 5.0}),
        ("gpt_oss", {"attention_bias": False}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("deepseek_v3", {"index_topk": 2048}),
        ("minimax_m2", {"qk_norm_type": "per_head"}),
        ("minimax_m2", {"attn_type_list": [1, 0]}),
    ],
)
def test_what_one_family_has_is_refused_of_another(one, config_of, change):
    assert list(find_foreign({**config_of(one), **change}))


def test_entries_of_published_files_are_no_obstacle(config_of):
    """What the authors' files have beyond what Transformers writes."""
    deepseek = {"aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "seq_aux": True,
                "topk_method": "noaux_tc", "pretraining_tp": 1, "attention_bias": False, "torch_dtype": "bfloat16"}  # fmt: skip
    minimax = {"attn_type_list": [1, 1], "layernorm_mlp_beta": 1.0, "qk_norm_type": "per_layer", "use_qk_norm": True,
               "use_routing_bias": True, "scoring_func": "sigmoid", "num_mtp_modules": 3, "use_mtp": True,
               "mtp_transformer_layers": 1, "shared_intermediate_size": 0, "attention_dropout": 0.0}  # fmt: skip
    qwen = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28, "router_aux_loss_coef": 0.001}
    gpt = {"experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0, "router_aux_loss_coef": 0.9}
    for family, more in (("deepseek_v3", deepseek), ("minimax_m2", minimax), ("qwen3_moe", qwen), ("gpt_oss", gpt)):
        assert not list(find_foreign(config_of(family) | more)), family
        assert not any(layer_windows(config_of(family) | more)) or family == "gpt_oss"


WINDOWED = {
    "mistral": {"sliding_window": 5},
    "mixtral": {"sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 5},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 5},
}


def test_windows_are_those_of_transformers_configurations():
    from transformers import CONFIG_MAPPING

    for family, values in WINDOWED.items():
        config = CONFIG_MAPPING[family](num_hidden_layers=4, **values).to_dict()
        listed = config.get("layer_types")
        expected = [kind == "sliding_attention" for kind in listed] if listed else [True] * 4
        assert layer_windows(config) == tuple(5 * slides for slides in expected), family
        without = {name: value for name, value in config.items() if name != "layer_types"}
        assert layer_windows(without) == layer_windows(config), family
    assert layer_windows({"model_type": "llama", "num_hidden_layers": 2, "sliding_window": 5}) == ()
    assert set(WINDOWED) <= set(FAMILIES)
