"""A model is held against its plain forward when the engine is built."""

from __future__ import annotations

import pytest
import torch

from miles_core.errors import CheckpointError
from miles_core.testing.tiny import tiny_checkpoint
from miles_embedded.engine.self_check import plain, self_check
from miles_embedded.model.load import load_model


def counted_over_the_call(model):
    """Positions by the place in the call, as some families count them."""
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1]).expand_as(position_ids) * 3)


def fails(model):
    def hook(module, args, kwargs):
        if kwargs.get("call") is not None:
            raise KeyError("call")

    model.model.layers[0].self_attn.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (counted_over_the_call, r"LlamaForCausalLM is not computed rightly .* log-probs differ .*--no-self-check"),
        (fails, r"LlamaForCausalLM cannot be run by the embedded backend \(KeyError: 'call'\)"),
    ],
)
def test_one_that_is_wrong_is_refused(broken, message, tmp_path):
    model = load_model(tiny_checkpoint("llama", tmp_path / "model"))
    broken(model)
    with pytest.raises(CheckpointError, match=message):
        self_check(model)


def test_afterwards_the_model_is_as_it_was(tmp_path):
    model = load_model(tiny_checkpoint("qwen3_moe", tmp_path / "model"))
    before = model.config._attn_implementation, model.config._experts_implementation
    with plain(model):
        assert model.config._attn_implementation == "eager"
    assert (model.config._attn_implementation, model.config._experts_implementation) == before


def test_an_engine_is_checked_when_a_run_builds_it(toy_run, monkeypatch):
    seen = []
    monkeypatch.setattr("miles_embedded.engine.build.self_check", lambda model: seen.append(type(model).__name__))
    toy_run(steps=0)
    assert seen == []
    toy_run(steps=0, self_check=True)
    assert seen == ["Qwen3MoeForCausalLM"]


def test_a_model_with_several_tokens_that_end_a_text(tmp_path):
    self_check(load_model(tiny_checkpoint("llama", tmp_path / "model", eos_token_id=[1, 2])))
