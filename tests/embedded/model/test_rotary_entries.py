"""Rotary entries that a release of Transformers ignores: completed or refused, never dropped."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import MiniMaxM2Config, Qwen3Config

from miles_core.errors import CheckpointError
from miles_embedded.model.load import checkpoint_config, load_model
from miles_embedded.model.rotary_entries import complete_rotary
from miles_testing import tiny_checkpoint


def test_the_rotated_part_of_a_head_comes_from_rotary_dim(tmp_path):
    """The authors' files of MiniMax-M2 give ``rotary_dim`` only."""
    model = tiny_checkpoint("minimax_m2", tmp_path)
    stored = json.loads((model / "config.json").read_text())
    stored.pop("rope_parameters")
    (model / "config.json").write_text(json.dumps({**stored, "rope_theta": 1e4, "rotary_dim": 4}))
    assert checkpoint_config(model).rope_parameters["partial_rotary_factor"] == 0.25
    (rope,) = (m for m in load_model(model).modules() if type(m).__name__.endswith("RotaryEmbedding"))
    torch.testing.assert_close(rope.inv_freq, 1e4 ** -torch.tensor([0.0, 0.5]))


def test_an_entry_that_is_there_stays():
    config = MiniMaxM2Config(head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    config.rotary_dim, config.rope_parameters = 4, {**config.rope_parameters, "partial_rotary_factor": 0.5}
    complete_rotary(config)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5


def test_parameters_per_layer_type_that_the_class_does_not_read_are_refused():
    """OLMo 3's class of Transformers 5.12 adds its defaults, which it reads, next to entries per layer type."""
    config = Qwen3Config()
    config.rope_parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "rope_type": "default",
        "rope_theta": 1e4,
    }
    with pytest.raises(CheckpointError, match=r"per layer type \(full_attention\), and Qwen3Config .* newer release"):
        complete_rotary(config)
