"""Building an engine compares the model with its plain forward pass."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from miles_core.errors import CheckpointError
from miles_embedded.engine.runner import Runner
from miles_embedded.engine.self_check import self_check
from miles_embedded.model.call import active_call
from miles_embedded.model.load import load_model
from miles_embedded.model.self_check import in_float32, plain_forwards, probe_sequences
from miles_embedded.testing.families import family_checkpoint, lacking
from miles_embedded.trainer import self_check as trained
from miles_testing.tiny import tiny_checkpoint


def counted_over_the_call(model):
    """Positions by the place in the call, as some families count them."""
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1]).expand_as(position_ids) * 3)


def not_a_number(model):
    """Some packed tokens become NaN, as a faulty kernel makes them; the plain forward is right."""

    def hook(module, args, kwargs, output):
        if active_call() is not None:
            output[0][..., -3:, :] = torch.nan
        return output

    model.model.layers[0].self_attn.register_forward_hook(hook, with_kwargs=True)


def fails(model):
    def hook(module, args, kwargs):
        if kwargs.get("call") is not None:
            raise KeyError("call")

    model.model.layers[0].self_attn.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (counted_over_the_call, r"LlamaForCausalLM is not computed correctly .* log-probs differ .*--no-self-check"),
        (not_a_number, r"LlamaForCausalLM is not computed correctly .* log-probs differ .* nan nats .*--no-self-check"),
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
    with plain_forwards(model):
        assert model.config._attn_implementation == "eager"
    assert (model.config._attn_implementation, model.config._experts_implementation) == before


def test_afterwards_an_attached_draft_of_another_family_is_as_it_was(tmp_path):
    model = load_model(tiny_checkpoint("qwen3", tmp_path / "model"))
    model.draft = load_model(tiny_checkpoint("llama", tmp_path / "draft")).model
    before = dict(vars(model.draft.config))
    with plain_forwards(model):
        assert model.draft.config._attn_implementation == "eager"
    assert vars(model.draft.config) == before


def test_an_engine_is_checked_when_a_run_builds_it(toy_run, monkeypatch):
    seen = []
    monkeypatch.setattr("miles_embedded.engine.build.self_check", lambda model: seen.append(type(model).__name__))
    toy_run(steps=0)
    assert seen == []
    toy_run(steps=0, self_check=True)
    assert seen == ["Qwen3MoeForCausalLM"]


def test_a_model_with_several_tokens_that_end_a_text(tmp_path):
    self_check(load_model(tiny_checkpoint("llama", tmp_path / "model", eos_token_id=[1, 2])))


def late_temperature(model):
    """From row 32 on, for packed and cached rows only."""
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def late(x, position_ids):
        factor = 1 + 0.2 * (position_ids >= 32) * in_call()
        return tuple(part * factor[..., None] for part in forward(x, position_ids))

    rotary.forward = late


def in_call():
    return active_call() is not None


@pytest.mark.parametrize("check", [self_check, trained.self_check])
def test_what_begins_late_is_found_in_either_dtype(check, tmp_path):
    checkpoint = tiny_checkpoint("qwen3", tmp_path / "model")
    for dtype in ("float32", "bfloat16"):
        model = load_model(checkpoint, dtype)
        late_temperature(model)
        with pytest.raises(CheckpointError, match=r"is not computed correctly .* in float32"):
            check(model)


def test_a_small_scale_is_found_in_bfloat16(tmp_path):
    model = load_model(tiny_checkpoint("qwen3", tmp_path / "model"), "bfloat16")
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **named: tuple(
        x if x is None else x * (0.97 if in_call() else 1) for x in forward(*args, **named)
    )
    with pytest.raises(CheckpointError, match="is not computed correctly"):
        self_check(model)


def test_a_plain_forward_that_fails_is_a_failed_check(tmp_path):
    model = load_model(tiny_checkpoint("llama", tmp_path / "model"))

    def hook(module, args, kwargs):
        if kwargs.get("call") is None:
            raise KeyError("call")

    model.model.layers[0].self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(
        CheckpointError, match=r"could not be compared with its plain forward.*KeyError.*--no-self-check"
    ):
        self_check(model)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "llama, longrope", "llama, dynamic", "llama4"])
@pytest.mark.parametrize("check", [self_check, trained.self_check])
def test_families_with_plain_forwards_of_their_own_pass(family, check, tmp_path):
    if lacking(family):
        pytest.skip(lacking(family))
    check(load_model(family_checkpoint(family, tmp_path / "model"), "bfloat16"))


def test_the_model_is_kept_in_its_dtype(tmp_path):
    model = load_model(tiny_checkpoint("qwen3_moe", tmp_path / "model"), "bfloat16")
    before = {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError), in_float32(model):
        assert model.lm_head.weight.dtype == torch.float32
        raise RuntimeError
    self_check(model)
    assert {name: (tensor.dtype, tensor.data_ptr()) for name, tensor in model.state_dict().items()} == before


def test_the_sequences_cross_the_boundaries(tmp_path):
    config = {"use_sliding_window": True, "sliding_window": 80, "max_window_layers": 1}
    model = load_model(tiny_checkpoint("qwen3", tmp_path / "model", **config))
    assert [len(s) for s in probe_sequences(model)] == [96, 17, 9]


def test_the_trainer_is_checked_where_the_engine_is_another_one(toy_run, monkeypatch):
    seen = []
    monkeypatch.setattr("miles_embedded.trainer.build.self_check", lambda model: seen.append(type(model).__name__))
    toy_run(steps=0, self_check=True)
    assert seen == []


@pytest.mark.skipif(bool(lacking("nemotron_h")), reason=lacking("nemotron_h"))
def test_an_error_of_a_state_that_grows_with_the_fed_tokens_is_found(tmp_path, monkeypatch):
    """Prompts with time steps of at least 6e-4 and generated tokens without a limit, as Transformers runs Nemotron-H."""
    model = load_model(family_checkpoint("nemotron_h", tmp_path / "model"), "float32")
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (6e-4, float("inf"))
    with pytest.raises(CheckpointError, match="where tokens are generated"):
        self_check(model)
    monkeypatch.setattr("miles_embedded.engine.self_check.FED_WITH_STATES", 3)
    self_check(model)


@pytest.mark.parametrize(("draws", "refused"), [(1, False), (2, True)])
def test_a_difference_in_one_draw_of_tokens_is_chance(draws, refused, tmp_path, monkeypatch):
    """Two experts with equal router logits change the scores of a draw; an error changes those of others, too."""
    model, seen = load_model(tiny_checkpoint("llama", tmp_path / "model")), set()
    score = Runner.score

    def flawed(self, sequences, *args):
        seen.add(tuple(sequences[0]))
        return [found + (len(seen) <= draws) for found in score(self, sequences, *args)]

    monkeypatch.setattr(Runner, "score", flawed)
    with pytest.raises(CheckpointError, match="packed sequences are scored") if refused else nullcontext():
        self_check(model)
    assert len(seen) == (2 if refused else 3)
