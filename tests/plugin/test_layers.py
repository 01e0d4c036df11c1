"""Kinds of layers, from the entries that checkpoints of each family have."""

import pytest

from miles_core.plugin.layers import layer_kinds

STATE, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("entries", "kinds"),
    [
        ({"layer_types": ["mamba", "attention"]}, (STATE, FULL)),  # Granite 4
        ({"layers_block_type": [STATE, "moe"]}, (STATE, "moe")),
        ({"hybrid_override_pattern": "M*E-"}, (STATE, FULL, "moe", "mlp")),
        ({"full_attention_interval": 2}, (STATE, FULL, STATE, FULL)),
        ({"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}, (STATE, STATE, STATE, FULL)),
        ({"attn_layer_period": 3, "attn_layer_offset": 1}, (STATE, FULL, STATE, STATE)),
        ({"attn_layer_indices": [0]}, (FULL, STATE, STATE, STATE)),
        ({"full_attn_idxs": [1, 2], "conv_L_cache": 3}, ("conv", FULL, FULL, "conv")),
        ({"model_type": "falcon_h1"}, ("hybrid",) * 4),
        ({"model_type": "mamba2"}, (STATE,) * 4),
        ({"model_type": "llama"}, ()),
    ],
)
def test_kinds_of_layers(entries, kinds):
    assert layer_kinds({"num_hidden_layers": 4, **entries}) == kinds
