"""The padding token's row of the embedding: its gradient is that of Transformers' modules."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from miles_core.plugin import CheckpointError
from miles_core.trainer import Callbacks
from miles_megatron import families
from miles_megatron.testing import make
from miles_testing import Setup, tiny_checkpoint
from miles_testing.yardstick import make_batch, weighted, yardstick, yardstick_model

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
needs_megatron = pytest.mark.skipif(not INSTALLED, reason="needs megatron-core")

#: A token that samples of ``make_batch`` contain, also in front of trained tokens.
PADDING = 5
TABLE = "model.embed_tokens.weight"


@pytest.mark.parametrize("entry", [{}, {"pad_token_id": None}, {"pad_token_id": 7}, {"pad_token_id": -2}])
def test_the_row_is_the_one_of_the_modules_of_transformers(config_of, family, entry, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(family)
    del config["pad_token_id"]
    config |= entry
    config["vocab_size"] = 128_010  # SmolLM3's default is 128004
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert families.read(config).padding == model.get_input_embeddings().padding_idx


def test_a_row_outside_of_the_embedding_is_refused(config_of):
    for token in (64, -65):
        with pytest.raises(CheckpointError, match=rf"pad_token_id is {token} .*the embedding has 64 rows: write"):
            families.read({**config_of("llama"), "pad_token_id": token, "vocab_size": 64})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Whether the output layer is tied -> a model of four layers."""

    def make_model(tied):
        directory = tmp_path_factory.mktemp("padding") / "model"
        return tiny_checkpoint("llama", directory, num_hidden_layers=4, pad_token_id=PADDING, tie_word_embeddings=tied)

    return make_model


def make_trainer(checkpoint, sizes):
    trainer = make(checkpoint, replace(Setup(), clip_grad=1e9), **sizes)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_is_that_of_transformers(model, tied):
    checkpoint, batch = model(tied), make_batch()
    right = yardstick_model(checkpoint)
    (yardstick(right, batch, Setup().temperature)[0] * batch.column("weight")).sum().backward()
    expected = right.get_input_embeddings().weight.grad
    trainer = make_trainer(checkpoint, {})
    trainer.step(batch)
    found = trainer.weights.held["embedding.word_embeddings.weight"].main_grad
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert bool(found[PADDING].any()) == tied and (batch.tokens == PADDING).sum() > 3


def step(checkpoint, sizes):
    """The exported table after one step."""
    trainer = make_trainer(checkpoint, sizes)
    trainer.step(make_batch())
    return {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}[TABLE]


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tied", "sizes"),
    [
        (False, {"tp": 2}),
        (False, {"tp": 2, "sequence": True}),
        (True, {"tp": 2, "sequence": True}),
        (True, {"pp": 2}),
        (False, {"cp": 2}),
    ],
    ids=str,
)
def test_two_ranks_compute_the_gradient_of_one(ranks, model, tied, sizes):
    checkpoint = model(tied)
    expected = step(checkpoint, {})
    for found in ranks.run(step, checkpoint, sizes):
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
