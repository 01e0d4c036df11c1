"""Tiny checkpoints of every family with a table of weights."""

import json
from functools import cache

import pytest
import torch

from miles_core.testing import tiny_checkpoint
from miles_megatron.families import FAMILIES

#: Families whose tiny configuration is another one's with changes: (configuration class, whose, changes).
LIKE = {
    "mistral": ("MistralConfig", "llama", {"tie_word_embeddings": False, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "llama", {}),
    "qwen2_moe": ("Qwen2MoeConfig", "qwen3_moe", {"shared_expert_intermediate_size": 24, "norm_topk_prob": False}),
}


def pytest_generate_tests(metafunc):
    """``family``: each of them."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)


def make_checkpoint(family, directory, **changes):
    """A random model of a family, as ``tiny_checkpoint`` makes them."""
    if family not in LIKE:
        return tiny_checkpoint(family, directory, **changes)
    import transformers

    from miles_core.testing.tiny import FAMILIES as known

    name, like, own = LIKE[family]
    values = {k: v for k, v in known[like][1].items() if k != "head_dim"}
    config = getattr(transformers, name)(**{**values, **own, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """family -> directory."""

    @cache
    def made(family):
        return make_checkpoint(family, tmp_path_factory.mktemp(family))

    return made


@pytest.fixture
def config_of(checkpoints):
    """family -> its ``config.json``."""
    return lambda family: json.loads((checkpoints(family) / "config.json").read_text())
