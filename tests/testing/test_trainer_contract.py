"""The trainer contract holds for a trainer of another shape, and notices trainers that break it."""

import pytest
import torch

from miles_core.contracts.trainer import Callbacks
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded import active_context
from miles_embedded.model.load import load_model
from miles_embedded.testing.staged_trainer import StagedTrainer
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.tiny import tiny_checkpoint
from miles_testing.trainer_contract import Setup, TrainerContract
from miles_testing.yardstick import make_batch, weighted, weights


def build(kind, checkpoint, setup, **changes):
    config = TrainerConfig(
        optimizer=OptimizerConfig(
            lr=setup.lr, weight_decay=setup.weight_decay, betas=setup.betas, eps=setup.eps, clip_grad=setup.clip_grad
        ),
        temperature=setup.temperature,
        micro_batch_size=setup.micro_batch_size,
        max_tokens=setup.max_tokens,
        recompute=setup.recompute,
        entropy=setup.entropy,
        **changes,
    )
    return kind(load_model(checkpoint, "float32"), config, lambda: load_model(checkpoint, "float32"))


class TestStaged(TrainerContract):
    def active_context(self):
        return active_context

    def make(self, checkpoint, setup):
        return build(StagedTrainer, checkpoint, setup)


class TestStagedDense(TestStaged):
    family = "llama"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("contract") / "checkpoint")


def test_the_first_stage_has_no_logits_and_several_micro_batches_are_under_way(checkpoint):
    trainer = build(StagedTrainer, checkpoint, Setup())
    seen = []

    def forward(chunk, micro, ctx):
        output = trainer.forward(chunk, micro, ctx)
        seen.append((trainer.chunks.index(chunk), output.log_probs is None, output.hidden is None))
        return output

    trainer.bind(Callbacks(forward, weighted, trainer.optimizer_step))
    trainer.step(make_batch())
    assert set(seen) == {(0, True, False), (1, False, True)}
    assert [stage for stage, *_ in seen] == [0, 0, 0, 1, 1, 1]


def test_balancing_is_the_same_in_stages(checkpoint):
    results = []
    for kind in (EmbeddedTrainer, StagedTrainer):
        trainer = build(kind, checkpoint, Setup(), aux_loss_coef=0.5)
        trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
        results.append((trainer.step(make_batch())["train/load_balance"][0], weights(trainer)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, tensor in results[0][1].items():
        torch.testing.assert_close(tensor, results[1][1][name], rtol=0, atol=1e-5)


class _Averaging(EmbeddedTrainer):
    """Averages gradients over micro-batches."""

    def optimizer_step(self):
        count = len(self.split(make_batch()))
        for master in self.optimizer.masters.values():
            master.grad /= count
        return super().optimizer_step()


class _Forgetful(EmbeddedTrainer):
    """Loads weights but not the moments."""

    def load(self, directory):
        super().load(directory)
        self.reset_optimizer()


class _Late(EmbeddedTrainer):
    """Off by one: log-probs sit at the token that predicts."""

    def forward(self, chunk, micro_batch, ctx):
        output = super().forward(chunk, micro_batch, ctx)
        output.log_probs = output.log_probs.roll(-1)
        return output


class _Sharing(EmbeddedTrainer):
    """Shares prompts whatever the input columns say."""

    def prepare(self, batch, samples, kind, entropy):
        batch.inputs = frozenset()
        return super().prepare(batch, samples, kind, entropy)


BROKEN = {
    "test_the_result_does_not_depend_on_the_split": (_Averaging, {"cut": {"micro_batch_size": 1}}),
    "test_resuming_continues_bit_for_bit": (_Forgetful, {"tmp_path": None}),
    "test_log_probs_are_those_of_the_model": (_Late, {}),
    "test_tokens_with_different_inputs_are_computed_apart": (_Sharing, {"batch": None}),
}


@pytest.mark.parametrize("test", BROKEN)
def test_a_broken_trainer_is_noticed(test, checkpoint, tmp_path):
    kind, arguments = BROKEN[test]

    class Suite(TrainerContract):
        def make(self, checkpoint, setup):
            return build(kind, checkpoint, setup)

    arguments = {"batch": make_batch()} | arguments | ({"tmp_path": tmp_path} if "tmp_path" in arguments else {})
    arguments = {k: v for k, v in arguments.items() if v is not None}
    with pytest.raises(AssertionError):
        getattr(Suite(), test)(checkpoint, **arguments)
