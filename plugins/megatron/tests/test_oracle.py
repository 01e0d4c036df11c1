"""The tables of weights against those of mbridge, where it is installed: which tensors make one, and how."""

from types import SimpleNamespace

import pytest
import torch

from miles_megatron import families
from miles_megatron.families.parts import transformer_engine_name
from miles_megatron.layout import shard
from miles_megatron.shapes import shapes


@pytest.fixture(scope="module")
def bridges():
    """``model_type`` -> class; they know one rank and TransformerEngine's names."""
    pytest.importorskip("megatron.core")
    pytest.importorskip("mbridge", exc_type=ImportError)
    from mbridge.core.bridge import _MODEL_REGISTRY

    return _MODEL_REGISTRY


def test_a_matrix_is_made_of_the_same_tensors_in_the_same_way(bridges, family, config_of):
    if family not in bridges:
        pytest.skip(f"mbridge has no {family}")
    config, a = config_of(family), families.read(config_of(family))
    bridge = object.__new__(bridges[family])  # what it is made with needs CUDA
    bridge.hf_config, bridge.dtype, bridge.make_vocab_size_divisible_by = SimpleNamespace(**config), None, None
    bridge.config = SimpleNamespace(num_layers=a.layers, num_moe_experts=a.experts and a.experts.count)
    torch.manual_seed(0)
    for entry in families.weights(a):
        if entry.name.startswith("mtp."):
            continue
        name = transformer_engine_name(entry, a)
        assert bridge._weight_name_mapping_mcore_to_hf(name) == list(entry.checkpoint), name
        tensors = [torch.randn(shape) for shape in shapes(entry, a).values()]
        assert torch.equal(bridge._weight_to_mcore_format(name, tensors), shard(entry, tensors, a)), name
