"""The embedded trainer: the contract for five families, and what is its own."""

import pytest
import torch

from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import collate
from miles_core.errors import CheckpointError, ConfigError
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded import active_context
from miles_embedded.model.load import load_model
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.tiny import tiny_checkpoint
from miles_testing.trainer_contract import Setup, TrainerContract
from miles_testing.yardstick import copy_weights, make_batch, weighted, weights


def trainer_config(setup, **changes):
    values = {
        "optimizer": OptimizerConfig(
            lr=setup.lr,
            weight_decay=setup.weight_decay,
            betas=setup.betas,
            eps=setup.eps,
            clip_grad=setup.clip_grad,
        ),
        "temperature": setup.temperature,
        "micro_batch_size": setup.micro_batch_size,
        "max_tokens": setup.max_tokens,
        "recompute": setup.recompute,
        "entropy": setup.entropy,
    }
    return TrainerConfig(**(values | changes))


def embedded(checkpoint, setup=None, dtype="float32", device="cpu", **changes):
    trainer = EmbeddedTrainer(
        load_model(checkpoint, dtype, device),
        trainer_config(setup or Setup(), **changes),
        lambda: load_model(checkpoint, dtype, device),
    )
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer


class _Embedded(TrainerContract):
    def active_context(self):
        return active_context

    def make(self, checkpoint, setup):
        return embedded(checkpoint, setup)


class TestQwen3Moe(_Embedded):
    family = "qwen3_moe"


class TestLlama(_Embedded):
    family = "llama"


class TestDeepseekV3(_Embedded):
    family = "deepseek_v3"


class TestDeepseekV32(_Embedded):
    family = "deepseek_v32"
    frozen = ".indexer."


class TestGptOss(_Embedded):
    family = "gpt_oss"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("own") / "checkpoint")


def test_sharing_prompts_changes_the_work_and_not_the_result(checkpoint):
    batch, rows = make_batch(), []
    results = []
    for share in (True, False):
        trainer = embedded(checkpoint, share_prompts=share)
        inner = trainer.callbacks.forward
        trainer.callbacks.forward = lambda chunk, micro, ctx, inner=inner: (
            rows.append(len(ctx.rows)) or inner(chunk, micro, ctx)
        )
        trainer.step(batch)
        results.append(weights(trainer))
    assert sum(rows[: len(rows) // 2]) < 0.8 * sum(rows[len(rows) // 2 :])
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name], rtol=0, atol=1e-5)


def test_a_bfloat16_copy_follows_float32_masters(checkpoint):
    batch = make_batch()
    exact, rounded = embedded(checkpoint), embedded(checkpoint, dtype="bfloat16")
    start = copy_weights(rounded)
    # A step far below bfloat16's resolution must add up in the master.
    for _ in range(8):
        exact.step(batch, lr=2e-5)
        rounded.step(batch, lr=2e-5)
    for name, master in rounded.optimizer.masters.items():
        assert master.dtype == torch.float32
        torch.testing.assert_close(rounded.optimizer.copies[name].data, master.data.bfloat16(), rtol=0, atol=0)
    moved = [
        float((m - exact.optimizer.masters[n]).detach().norm())
        for n, m in rounded.optimizer.masters.items()
        if m.dim() > 1
    ]
    assert max(moved) < 1.0
    assert any(not torch.equal(start[n], t) for n, t in weights(rounded).items())


def test_masters_are_saved_with_a_bfloat16_copy(checkpoint, tmp_path):
    batch = make_batch()
    one = embedded(checkpoint, dtype="bfloat16")
    one.step(batch)
    one.save(tmp_path / "saved")
    other = embedded(checkpoint, dtype="bfloat16")
    other.load(tmp_path / "saved")
    one.step(batch)
    other.step(batch)
    assert all(torch.equal(m, other.optimizer.masters[n]) for n, m in one.optimizer.masters.items())


def test_balancing_does_not_depend_on_split_or_sharing(checkpoint):
    batch, results = make_batch(), []
    for changes in ({}, {"micro_batch_size": 1}, {"share_prompts": False}, {"recompute": True}):
        trainer = embedded(checkpoint, aux_loss_coef=0.5, **changes)
        metrics = trainer.step(batch)
        results.append((metrics["train/load_balance"], weights(trainer)))
    total, tokens = results[0][0]
    layers = 2
    assert tokens == float(batch.mask.sum())
    assert total / tokens >= 0.5 * layers * 0.99  # 1 a layer when balanced, more when not
    for pair, found in results[1:]:
        assert pair == pytest.approx(results[0][0], rel=1e-5)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, results[0][1][name], rtol=0, atol=1e-5)


def test_balancing_reaches_the_router(checkpoint):
    batch = make_batch()
    plain, balanced = embedded(checkpoint), embedded(checkpoint, aux_loss_coef=0.5)
    plain.step(batch)
    balanced.step(batch)
    name = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(weights(plain)[name], weights(balanced)[name], atol=1e-5)


def test_balancing_needs_experts(tmp_path):
    with pytest.raises(ConfigError, match="no routed experts"):
        embedded(tiny_checkpoint("llama", tmp_path / "dense"), aux_loss_coef=0.1)


def test_an_empty_batch_is_a_step_without_gradient(checkpoint):
    trainer = embedded(checkpoint)
    assert trainer.step(collate([]))["train/grad_norm"][0] == 0
    assert len(trainer.log_probs(collate([]), "old")["log_probs"]) == 0


def test_another_models_state_is_refused(checkpoint, tmp_path):
    trainer = embedded(checkpoint)
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        trainer.load(tmp_path)
    trainer.save(tmp_path / "saved")
    other = embedded(tiny_checkpoint("qwen3_moe", tmp_path / "wider", hidden_size=64))
    with pytest.raises(CheckpointError, match="shape"):
        other.load(tmp_path / "saved")
    (tmp_path / "saved" / "optimizer.safetensors").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="damaged"):
        trainer.load(tmp_path / "saved")


def test_training_is_not_random_under_recomputation(checkpoint):
    trainer = embedded(checkpoint, recompute=True)
    assert not any(m.training for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout))
    batch = make_batch()
    first, second = (trainer.log_probs(batch, "old")["log_probs"] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_same_step(checkpoint, dtype):
    batch = make_batch()
    here, there = embedded(checkpoint), embedded(checkpoint, dtype=dtype, device="cuda")
    expected, found = (t.log_probs(batch, "old")["log_probs"] for t in (here, there))
    assert (found - expected).norm() < (1e-4 if dtype == "float32" else 0.05) * expected.norm()
    here.step(batch)
    there.step(batch)
    for name, tensor in weights(there).items():
        torch.testing.assert_close(
            tensor.float().cpu(), weights(here)[name], rtol=0, atol=2e-3 if dtype == "float32" else 2e-2
        )
