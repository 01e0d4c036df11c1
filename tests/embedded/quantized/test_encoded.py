"""Weights that are stored as codes only compute as fake-quantised weights do, and are not kept for the backward pass."""

from __future__ import annotations

import weakref

import pytest
import torch

from miles_core.precision.products import Products
from miles_embedded import codes_of, encode_weights, full_values, load_model, mark_constant, share_weights
from miles_embedded.engine.weights import Weights
from miles_embedded.model.load_units import Update
from miles_embedded.model.views import export
from miles_embedded.quantized.codes import EncodedParameter
from miles_embedded.quantized.weights import install
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_formats import Codec, FormatCodec
from miles_testing.doubles.pair_format import PairFormat
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import make_batch


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("encoded") / "model")


@pytest.fixture
def encoded(checkpoint):
    model = load_model(checkpoint, reduce=lambda model: encode_weights(model, FormatCodec(PairFormat())))
    assert any(codes_of(p) for p in model.parameters())
    return model


def run(model):
    """Log-probabilities as in training, and the embeddings, which get a gradient."""
    weight = model.get_input_embeddings().weight.requires_grad_()
    trainer = EmbeddedTrainer(model, TrainerConfig(micro_batch_size=None))
    ((_, micro_batch, ctx),) = trainer.micro_batches(make_batch(), "train", entropy=False)
    return trainer.forward(model, micro_batch, ctx).log_probs, weight


def test_it_computes_like_fake_quantised_weights(checkpoint, encoded):
    other = load_model(checkpoint)
    install(other, FormatCodec(PairFormat()))
    ours, mine = run(encoded)
    theirs, its = run(other)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    assert torch.equal(ours, theirs) and torch.equal(mine.grad, its.grad)
    plain, _ = run(load_model(checkpoint))
    assert not torch.allclose(plain, ours, atol=1e-3)


def test_decoded_values_are_gone_before_the_backward_pass(encoded, monkeypatch):
    made, decode = [], EncodedParameter.values

    def values(self):
        found = decode(self)
        made.append(weakref.ref(found.untyped_storage()))
        return found

    monkeypatch.setattr(EncodedParameter, "values", values)
    log_probs, _ = run(encoded)
    count = len(made)
    assert count > 10 and not any(ref() for ref in made)
    log_probs.sum().backward()
    assert len(made) > count and not any(ref() for ref in made)


def test_models_share_codes(checkpoint, encoded):
    other = load_model(checkpoint, reduce=lambda model: share_weights(model, encoded))
    for name, parameter in other.named_parameters():
        mine = encoded.get_parameter(name)
        assert codes_of(parameter) is codes_of(mine) and (codes_of(mine) or parameter.data_ptr() == mine.data_ptr())
        assert torch.equal(full_values(parameter), full_values(mine))
    assert torch.equal(run(other)[0], run(encoded)[0])
    names = {name for unit in export(other) for name in unit.tensors}
    assert names == {name for unit in export(load_model(checkpoint)) for name in unit.tensors}


def test_constant_weights_need_no_update_and_survive_a_sleep(encoded):
    weights = Weights(encoded, Codec(), Products())
    before = {n: full_values(p).clone() for n, p in encoded.named_parameters()}
    weights.release()
    codes = [t for p in encoded.parameters() if (found := codes_of(p)) for t in found.tensors()]
    assert codes and not any(t.untyped_storage().nbytes() for t in codes)
    weights.restore()
    assert weights.load([], 3) == 0 and weights.complete and weights.version == 3
    assert all(torch.equal(full_values(p), before[n]) for n, p in encoded.named_parameters())


def test_a_constant_weight_may_stay_out_of_the_stream(checkpoint):
    model = load_model(checkpoint)
    head = model.get_output_embeddings().weight
    mark_constant([head], streamed=False)
    assert "lm_head.weight" not in {name for unit in export(model) for name in unit.tensors}
    assert not head.requires_grad and "lm_head.weight" not in Update(model).missing()
