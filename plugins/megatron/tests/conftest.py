"""Tiny checkpoints of every family with a table of weights."""

import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_embedded.testing.families import FAMILIES as MORE
from miles_megatron.families import FAMILIES, HYBRID
from miles_testing import tiny_checkpoint
from miles_testing.tiny import random_checkpoint

#: Families whose tiny configuration is another one's with changes: (configuration class, whose, changes).
LIKE = {
    "mistral": ("MistralConfig", "llama", {"tie_word_embeddings": False, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "llama", {}),
    "qwen2_moe": ("Qwen2MoeConfig", "qwen3_moe", {"shared_expert_intermediate_size": 24, "norm_topk_prob": False}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "deepseek_v3", {"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8}),
}
#: Further families of ``miles_embedded.testing``, and changes of their configuration. Transformers clamps Nemotron-H's time steps, which the
#: published model does not.
OTHER = {
    "bamba": {},
    "nemotron_h": {"time_step_min": 1e-12},
    "nemotron_h, dense": {"time_step_min": 1e-12},
    "nemotron_h, latent": {"time_step_min": 1e-12, "moe_latent_size": 24},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "ernie4_5": {},
    "olmoe": {},
}


def pytest_generate_tests(metafunc):
    """``family``: each of them."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", FAMILIES)


def make_checkpoint(family, directory, **changes):
    """A random model of a family, as ``tiny_checkpoint`` makes them; with random norms where layers have a state."""
    if family in HYBRID:
        import transformers

        name, values = MORE[family]
        # the norm of a delta net's output, which is 0 where a query meets no similar key, would amplify rounding
        config = getattr(transformers, name)(**{**values, "rms_norm_eps": 1e-2, **changes})
        return random_checkpoint(config, directory, biases=0.2)
    if family in OTHER:
        import transformers

        name, values = MORE[family.partition(",")[0]]
        config = getattr(transformers, name)(**{**values, **OTHER[family], **changes})
        return random_checkpoint(config, directory, biases=0.1)
    if family not in LIKE:
        return tiny_checkpoint(family, directory, **changes)
    import transformers

    from miles_testing.tiny import FAMILIES as known

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


@pytest.fixture(scope="session")
def make_model():
    """``make_checkpoint``."""
    return make_checkpoint


@pytest.fixture(scope="session")
def with_mtp(tmp_path_factory):
    """(family, model, copies) -> a directory: the model, a tiny one by default, with an MTP layer behind its last layer."""

    def make(family, model=None, copies=False):
        directory = tmp_path_factory.mktemp(family)
        shutil.copytree(model or make_checkpoint(family, directory / "plain"), directory / "model")
        directory = directory / "model"
        config = json.loads((directory / "config.json").read_text())
        stored, last = load_file(directory / "model.safetensors"), config["num_hidden_layers"] - 1
        added, noise = {}, torch.Generator().manual_seed(0)
        for name, tensor in stored.items():
            if name.startswith(f"model.layers.{last}."):
                moved = tensor + 0.01 * torch.randn(tensor.shape, generator=noise)
                added[name.replace(f".{last}.", f".{last + 1}.", 1)] = moved
        size, prefix = config["hidden_size"], f"model.layers.{last + 1}."
        for part in ("enorm", "hnorm", "shared_head.norm"):
            added[f"{prefix}{part}.weight"] = 1 + 0.1 * torch.randn(size, generator=noise)
        added[f"{prefix}eh_proj.weight"] = 0.1 * torch.randn(size, 2 * size, generator=noise)
        if copies:
            added[f"{prefix}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
            added[f"{prefix}shared_head.head.weight"] = stored["lm_head.weight"].clone()
        save_file(stored | added, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
        return directory

    return make


@pytest.fixture
def config_of(checkpoints):
    """family -> its ``config.json``."""
    return lambda family: json.loads((checkpoints(family) / "config.json").read_text())


@pytest.fixture
def changed(checkpoints, tmp_path):
    """The checkpoint of a family with other weights and another ``config.json``."""

    def make(family, weights=lambda w: None, **config):
        model = shutil.copytree(checkpoints(family), tmp_path / "model")
        stored = load_file(model / "model.safetensors")
        weights(stored)
        save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
        (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | config))
        return model

    return make
