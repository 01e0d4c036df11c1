"""Families whose modules need more than a table of weights: log-probs and gradients of packed samples, compared with Transformers.

Needs megatron-core; runs on a CPU with its local modules.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from miles_core.trainer import Callbacks, CheckpointFiles
from miles_megatron import count
from miles_megatron.examine import examine_checkpoint
from miles_megatron.layout import join
from miles_megatron.memory import Work, memory
from miles_megatron.sizes import Sizes
from miles_megatron.testing import make
from miles_testing import Setup
from miles_testing.tiny import random_checkpoint
from miles_testing.yardstick import make_batch, weighted, yardstick, yardstick_model

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]

#: Differences of log-probs in nats, and of gradients relative to their largest entry: rounding of float32, also in Transformers' ERNIE, which
#: rotates in float32 here too. The largest ones found are 1.4e-5 and 1.2e-5.
CLOSE = 2e-5

FAMILIES = ("glm4_moe_lite", "nemotron_h", "nemotron_h, latent", "bamba", "seed_oss", "smollm3", "ernie4_5", "olmoe")


def perturb(checkpoint, directory):
    """The model with norms, biases and corrections of routers that differ from their initial values, which would hide errors."""
    from transformers import AutoConfig

    return random_checkpoint(AutoConfig.from_pretrained(checkpoint), directory, biases=0.1)


@pytest.fixture(scope="module")
def perturbed(make_model, tmp_path_factory):
    made = {}

    def make_one(family):
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = perturb(make_model(family, directory / "plain"), directory / "model")
        return made[family]

    return make_one


def gradients(trainer):
    """Checkpoint name -> gradient of the last step, on one rank."""
    found = {}
    for entry in trainer.weights.entries:
        held = trainer.weights.held[entry.name]
        if hasattr(held, "main_grad"):
            found |= dict(zip(entry.checkpoint, join(entry, [held.main_grad], trainer.a), strict=True))
    return found


def expected(checkpoint, batch):
    """Log-probs [T] and checkpoint name -> gradient of the loss ``weighted``, by Transformers' eager modules in float64."""
    model = yardstick_model(checkpoint)
    log_probs = yardstick(model, batch, Setup().temperature)[0]
    (log_probs * batch.column("weight")).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(checkpoint.parent / "gradients")
    files = CheckpointFiles(checkpoint.parent / "gradients")
    return log_probs.detach(), {name: files.read(name) for name in files.entries if "correction_bias" not in name}


@pytest.mark.parametrize("chosen", FAMILIES)
def test_log_probs_and_gradients_are_those_of_transformers(perturbed, chosen):
    checkpoint, batch = perturbed(chosen), make_batch()
    trainer = make(checkpoint, replace(Setup(), clip_grad=1e9))
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    log_probs, right = expected(checkpoint, batch)
    found = trainer.log_probs(batch, "old")["log_probs"]
    torch.testing.assert_close(found.double(), log_probs, rtol=0, atol=CLOSE)
    trainer.step(batch)
    ours = gradients(trainer)
    assert ours.keys() == right.keys()
    for name, gradient in right.items():
        largest = gradient.abs().max().clamp(min=1e-12)
        assert float((ours[name].double() - gradient).abs().max() / largest) < CLOSE, name


@pytest.mark.parametrize("chosen", FAMILIES)
def test_the_plan_counts_the_parameters_of_the_built_model(perturbed, chosen):
    checkpoint = perturbed(chosen)
    examine_checkpoint(checkpoint)
    trainer = make(checkpoint, Setup())
    built = sum(parameter.numel() for chunk in trainer.chunks for parameter in chunk.parameters())
    assert count.model(trainer.a).total == built
    [stage] = memory(trainer.a, Sizes(), Work(tokens=1, micro_batches=1, width=4))
    assert (stage.weights, stage.gradients, stage.optimiser) == (4 * built, 4 * built, 12 * built)


@pytest.mark.parametrize("chosen", FAMILIES)
def test_an_export_is_bit_identical(perturbed, chosen, tmp_path):
    checkpoint = perturbed(chosen)
    make(checkpoint, Setup()).export(tmp_path, None)
    before, after = CheckpointFiles(checkpoint), CheckpointFiles(tmp_path)
    assert before.entries.keys() == after.entries.keys()
    for name in before.entries:
        assert torch.equal(before.read(name), after.read(name)), name
        assert before.read(name).dtype == after.read(name).dtype, name
