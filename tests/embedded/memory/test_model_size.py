"""Counted from config.json, against Transformers' own modules and published numbers."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from miles_core.plugin.detect import config_facts
from miles_embedded import model_size
from miles_embedded.engine.runner import Runner
from miles_embedded.manifest import STATEFUL
from miles_embedded.memory.usage import VERSIONS
from miles_embedded.model.load import load_model
from miles_embedded.testing import families
from miles_testing.tiny import FAMILIES, ROUTER_FAMILIES

PUBLISHED = Path(__file__).parents[2] / "published"
#: Entries that are made larger, so that matrices outweigh what is left out.
WIDE = ("hidden_size", "intermediate_size", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "head_dim", "qk_rope_head_dim",
        "qk_nope_head_dim", "v_head_dim", "intermediate_size_mlp", "global_head_dim", "mamba_head_dim", "mamba_d_ssm", "mamba_d_head",
        "linear_key_head_dim", "linear_value_head_dim", "shared_expert_intermediate_size", "shared_intermediate_size",
        "moe_shared_expert_intermediate_size")  # fmt: skip
STATEFUL_FAMILIES = [name for name in families.FAMILIES if name in STATEFUL and not families.lacking(name)]
LATENT = ("deepseek_v3", "kimi_linear", "bailing_hybrid")


def size_of(config):
    facts = {fact.name: fact.value for fact in config_facts(config)}
    return model_size(config, facts["model.moe_layers"], facts["model.mtp_layers"])


@pytest.mark.parametrize("family", FAMILIES | ROUTER_FAMILIES)
def test_parameters_are_those_that_transformers_makes(family):
    name, values = (FAMILIES | ROUTER_FAMILIES)[family]
    config = getattr(transformers, name)(**{k: v * 8 if k in WIDE else v for k, v in values.items()})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    made = sum(parameter.numel() for parameter in model.parameters())
    # DeepSeek V3.2 has an indexer beside its attention
    assert size_of(config.to_dict()).parameters == pytest.approx(made, rel=0.06 if family == "deepseek_v32" else 0.005)


@pytest.mark.parametrize(
    ("model", "billions", "bytes_per_token"),
    [
        ("qwen3-30b-a3b", 30.5, 98_304),
        ("qwen3-235b-a22b", 235.1, 192_512),
        ("qwen3-4b", 4.02, 147_456),
        ("qwen3-32b", 32.8, 262_144),
        ("deepseek-v3", 671.0, 70_272),
        ("kimi-k2", 1026.0, 70_272),
        ("glm-4.5", 352.8, 376_832),
        ("glm-4.5-air", 106.9, 188_416),
        ("gpt-oss-20b", 20.9, 49_152),
    ],
)
def test_published_models(model, billions, bytes_per_token):
    size = size_of(json.loads((PUBLISHED / f"{model}.json").read_text()))
    assert size.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert 2 * size.cached == bytes_per_token


def test_experts_of_a_latent_have_its_width():
    """Nemotron 3 Super: 123.6 billion parameters in its files, 2.94 billion of them in the MTP layer."""
    config = {
        "model_type": "nemotron_h", "hidden_size": 4096, "vocab_size": 131072, "num_attention_heads": 32, "num_key_value_heads": 2,
        "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "n_routed_experts": 512, "n_shared_experts": 1, "num_experts_per_tok": 22, "moe_latent_size": 1024, "moe_intermediate_size": 2688,
        "moe_shared_expert_intermediate_size": 5376, "num_nextn_predict_layers": 1,
        "hybrid_override_pattern": "MEMEMEM*" + "EMEMEMEM*" * 2 + "EMEMEMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME",
    }  # fmt: skip
    size = size_of(config)
    assert size.layers == 88
    assert size.parameters / 1e9 == pytest.approx(120.67, rel=1e-3)
    assert size.mtp / 1e9 == pytest.approx(2.94, rel=0.05)


def test_a_configuration_without_sizes_has_none():
    assert model_size({"model_type": "odd", "hidden_size": 8}, 0) is None


def test_the_time_does_not_depend_on_the_number_of_layers():
    config = json.loads((PUBLISHED / "qwen3-4b.json").read_text()) | {"num_hidden_layers": 10**9}
    assert model_size(config, 0).layers == 10**9


@pytest.mark.parametrize("family", STATEFUL_FAMILIES)
def test_layers_with_a_state_are_counted_as_transformers_makes_them(family):
    name, values = families.FAMILIES[family]
    config = getattr(transformers, name)(**{k: v * 8 if k in WIDE else v for k, v in values.items()})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    made = sum(parameter.numel() for parameter in model.parameters())
    assert size_of(config.to_dict()).parameters == pytest.approx(made, rel=0.005)


@pytest.mark.parametrize("family", STATEFUL_FAMILIES)
def test_states_take_the_bytes_that_the_engine_allocates(family, tmp_path):
    checkpoint = families.family_checkpoint(family, tmp_path / "model")
    runner = Runner(load_model(checkpoint, "bfloat16"))
    slots, _, _ = runner.prefixes([[3, 4, 5], [6, 7, 8, 9]], set())
    runner.cache.add_rows(slots.tolist())
    found = size_of(json.loads((checkpoint / "config.json").read_text()))
    for store, versions in ((runner.cache.own, VERSIONS), (runner.cache.prefixes, 1)):
        slabs = [slab for of_layer in store.states.values() for slab in of_layer.values()]
        allocated = sum(slab.numel() * slab.element_size() for slab in slabs)
        assert allocated == store.slots * versions * found.state_bytes(2) > 0


@pytest.mark.parametrize("family", [*(name for name in LATENT if not families.lacking(name)), "qwen3_moe"])
def test_a_cache_takes_the_bytes_that_the_engine_allocates(family, tmp_path):
    """The engine stores the keys and values that DeepSeek's and Kimi's attention computes from its latent, not the latent."""
    checkpoint = families.family_checkpoint(family, tmp_path / "model")
    runner = Runner(load_model(checkpoint, "bfloat16"))
    runner.prefixes([[3, 4, 5], [6, 7, 8, 9]], set())
    found, store = size_of(json.loads((checkpoint / "config.json").read_text())), runner.cache.prefixes
    allocated = sum(slab.numel() * slab.element_size() for slab in store.slabs.values())
    assert allocated == store.slots * store.width * 2 * found.expanded > 0
    assert found.expanded == found.cached or family in LATENT
