"""Reading ``config.json``: what no model has is refused with its entry and value."""

import json
import time

import pytest

from miles_core.errors import CheckpointError
from miles_core.plugin import model_config as module
from miles_core.plugin.detect import config_facts, model_facts
from miles_core.plugin.model_config import find_problem, model_config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"num_experts": 4, "num_experts_per_tok": 5}', "num_experts_per_tok is 5 where num_experts is 4"),
        ('{"text_config": {"n_routed_experts": 8, "num_experts_per_tok": 9}}', "num_experts_per_tok is 9"),
        ('{"num_experts": 4, "num_experts_per_tok": 0}', "between 1 and 4 experts"),
        ('{"num_hidden_layers": 10000000}', "num_hidden_layers is 10000000, more than the 2,000"),
        ('{"vision_config": {"depth": 9999999}}', "vision_config.depth is 9999999"),
        ('{"num_local_experts": 1e9}', "num_local_experts is 1000000000.0, more than"),
        ('{"rope_theta": 0}', "rope_theta is 0, and must be a number above 0"),
        ('{"rope_parameters": {"full_attention": {"rope_theta": -1.0}}}', "full_attention.rope_theta is -1.0"),
        ('{"text_config": {"rope_theta": Infinity}}', "text_config.rope_theta is inf"),
        ('{"rope_theta": "many"}', "rope_theta is 'many'"),
        ('{"attention_multiplier": NaN}', "attention_multiplier is NaN"),
        ('{"short_factor": [1.0, NaN]}', r"short_factor\[1\] is NaN"),
        ('{"hidden_size": 8, "hidden_size": 16}', "the key 'hidden_size' occurs 2 times in one object"),
        ('{"text_config": {"a": 1, "b": 1, "a": 1}}', "the key 'a' occurs 2 times"),
    ],
)
def test_what_no_model_has_is_refused_at_once(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=words) as caught:
        model_facts(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and time.monotonic() - began < 1


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 1, "num_experts_per_tok": 2},
        {"num_experts_per_tok": 2},
        {"num_experts": 4, "num_experts_per_tok": [2, 1]},
        {"time_step_limit": [0.0, float("inf")], "rope_theta": None, "rms_norm_eps": 0.0},
        {"num_hidden_layers": 126, "vision_config": {"depth": 32}, "rope_scaling": None},
    ],
)
def test_what_published_models_have_is_accepted(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_problem(config) == "" and model_config(str(tmp_path)) == config


def test_a_file_is_parsed_once_until_it_changes(tmp_path, monkeypatch):
    """A refused plan reads it again for every change that it tries."""
    parsed = []
    monkeypatch.setattr(module, "load_strict_json", lambda text: parsed.append(text) or json.loads(text))
    for layers, times in ((2, 3), (3, 2)):
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": layers, "only_here": 1}))
        assert [model_config(str(tmp_path))["num_hidden_layers"] for _ in range(times)] == [layers] * times
    assert len(parsed) == 2


def test_the_type_is_that_of_the_whole_checkpoint():
    text = {"model_type": "qwen2_5_vl_text", "num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 8}
    facts = {f.name: f.value for f in config_facts({"model_type": "qwen2_5_vl", "vocab_size": 9, "text_config": text})}
    assert (facts["model.type"], facts["model.layers"], facts["model.vocab_size"]) == ("qwen2_5_vl", 2, 64)
    assert {f.name: f.value for f in config_facts({"text_config": text})}["model.type"] == "qwen2_5_vl_text"
