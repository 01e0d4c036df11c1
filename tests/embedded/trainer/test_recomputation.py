"""Recomputed layers give the same gradients, keep only their inputs, and refuse what would give wrong gradients."""

import weakref
from functools import partial

import pytest
import torch

from miles_core.trainer import Callbacks, OptimizerConfig
from miles_embedded import load_model
from miles_embedded.trainer.recomputation import recompute
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import make_batch, weighted


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def checkpoint(request, tmp_path_factory):
    return tiny_checkpoint(request.param, tmp_path_factory.mktemp("model"))


def trainer_of(checkpoint, recomputes, loss=weighted):
    trainer = EmbeddedTrainer(load_model(checkpoint), TrainerConfig(OptimizerConfig(), recompute=recomputes))
    trainer.bind(Callbacks(trainer.forward, loss, dict))  # the gradients stay
    return trainer


def gradients(trainer):
    trainer.step(make_batch())
    return {name: tensor.grad for name, tensor in trainer.model.named_parameters()}


def test_gradients_are_bit_identical(checkpoint):
    plain, recomputed = (gradients(trainer_of(checkpoint, recomputes)) for recomputes in (False, True))
    assert plain.keys() == recomputed.keys() and any(grad is not None for grad in plain.values())
    for name, grad in plain.items():
        assert (grad is None and recomputed[name] is None) or torch.equal(grad, recomputed[name]), name


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_layer_keeps_its_input_only(checkpoint, recomputes):
    trainer, inside, alive = trainer_of(checkpoint, recomputes), [], []
    layer = trainer.model.get_submodule("model.layers.0")
    layer.post_attention_layernorm.register_forward_hook(lambda module, args, out: inside.append(weakref.ref(out)))
    trainer.model.get_submodule("model.norm").register_forward_hook(lambda *_: alive.append(inside[-1]() is not None))
    trainer.step(make_batch())
    assert alive and all(alive) != recomputes
    assert len(inside) == (2 if recomputes else 1) * len(alive)


def test_weights_above_frozen_inputs_are_trained():
    layer, x = torch.nn.Linear(3, 3), torch.ones(2, 3)
    recompute(partial(layer.forward), x).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 3), 2.0))


def test_frozen_weights_above_frozen_inputs_get_no_gradient():
    layer, x = torch.nn.Linear(3, 3).requires_grad_(False), torch.ones(2, 3)
    recompute(partial(layer.forward), x).sum().backward()
    assert layer.weight.grad is None and x.grad is None


def test_tuples_and_unused_outputs():
    x = torch.ones(2, requires_grad=True)
    first, nothing, second = recompute(partial(lambda x: (2 * x, None, 3 * x)), x)
    assert nothing is None and second.requires_grad
    first.sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_tensors_in_keywords_get_their_gradients():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    recompute(partial(lambda x, pair: x * pair[1], pair=(1, y)), x).sum().backward()
    assert x.grad.tolist() == y.grad.tolist() == [1, 1]


def test_a_loss_that_reads_inside_a_layer_is_refused():
    x, kept = torch.ones(2, requires_grad=True), []

    def forward(x):
        kept.append(3 * x)
        return 2 * x

    out = recompute(partial(forward), x)
    with pytest.raises(RuntimeError, match="kept from inside a decoder layer"):
        (out.sum() + kept[0].sum()).backward()
