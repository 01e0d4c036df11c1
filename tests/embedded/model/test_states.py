"""Modules with a state: what they can continue, and the limits of their time steps."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_embedded.engine.runner import Runner
from miles_embedded.model.export import export_checkpoint
from miles_embedded.model.load import load_model
from miles_embedded.model.operations import TORCH, use_operations
from miles_embedded.model.parts import decoder_layers
from miles_embedded.model.states import LayerStates, continues_sequences, stateful_modules
from miles_embedded.testing.families import family_checkpoint, lacking

#: Families of which each module with a state is of another kind.
KINDS = ("qwen3_next", "kimi_linear", "bailing_hybrid", "olmo_hybrid", "lfm2", "bamba", "mamba", "jamba")


def first_stateful(model):
    return next(module for layer in decoder_layers(model) for module in stateful_modules(layer))


@pytest.mark.parametrize("family", [name for name in KINDS if not lacking(name)])
def test_a_module_continues_after_a_state_exactly_if_its_code_says_so(family, tmp_path):
    module = first_stateful(load_model(family_checkpoint(family, tmp_path / "model"), "float32"))
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    states = LayerStates()
    own = type(module).forward
    with torch.no_grad():
        whole = own(module, hidden)
        own(module, hidden[:, :5], cache=states)
        found = own(module, hidden[:, 5:], cache=LayerStates(states.kept))
    assert (
        torch.allclose(found, whole[:, 5:], atol=1e-4)
        == continues_sequences(module)
        == (family not in ("mamba", "jamba"))
    )


@pytest.mark.skipif(bool(lacking("nemotron_h")), reason=lacking("nemotron_h"))
def test_time_steps_have_the_limits_of_the_configuration(tmp_path):
    """Transformers limits those of Nemotron-H's prompts by another entry of its configuration."""
    checkpoint = family_checkpoint("nemotron_h", tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert plain.config.time_step_limit == [0.0, float("inf")]
    assert plain.model.layers[0].mixer.time_step_limit == (plain.config.time_step_min, float("inf"))
    assert first_stateful(load_model(checkpoint, "float32")).time_step_limit == (0.0, float("inf"))


@pytest.mark.skipif(bool(lacking("qwen3_next")), reason=lacking("qwen3_next"))
def test_an_export_keeps_the_interval_of_full_attention(tmp_path):
    """Transformers reads it and does not write it, and SGLang cannot load a model without it."""
    path = family_checkpoint("qwen3_next", tmp_path / "model") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"full_attention_interval": 2}))
    export_checkpoint(load_model(path.parent, "float32"), None, tmp_path / "export")
    exported = json.loads((tmp_path / "export" / "config.json").read_text())
    assert exported["full_attention_interval"] == 2 and exported["layer_types"] == config["layer_types"]


def test_only_states_that_a_module_reads_or_writes_are_kept():
    """A layer may have several modules, each with a kind of its own."""
    given = {("convolution", index): torch.full((1, 2, 3), float(index)) for index in range(2)}
    states = LayerStates(given)
    states.update_conv_state(torch.ones(1, 2, 1), 0, state_idx=1, conv_kernel_size=3)
    assert states.kept.keys() == {("convolution", 1)}
    state = states.get_conv_state(0, state_idx=0)
    state.add_(5)  # as kernels for one token do
    assert torch.equal(states.kept["convolution", 0], torch.full((1, 2, 3), 5.0))


@pytest.mark.skipif(bool(lacking("mamba")), reason=lacking("mamba"))
def test_a_model_with_residuals_in_float32_scores_in_bfloat16(tmp_path):
    runner = Runner(load_model(family_checkpoint("mamba", tmp_path), "bfloat16"))
    (scored,) = runner.score([[3, 4, 5, 6]], 1.0)
    assert scored.shape == (3,) and (scored < 0).all()


@pytest.mark.parametrize("family", KINDS)
def test_states_stay_when_a_model_gets_other_operations(family, tmp_path):
    """Kernels of a GPU and of plugins are such operations."""
    if why := lacking(family):
        pytest.skip(why)
    model = load_model(family_checkpoint(family, tmp_path), "float32")
    sequences = [[3 + 7 * i % 40 for i in range(n)] for n in (23, 9, 17)]
    expected = Runner(model).score(sequences, 1.0)
    use_operations(model, TORCH)
    for found, right in zip(Runner(model).score(sequences, 1.0), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-4)
