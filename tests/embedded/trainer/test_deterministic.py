"""``--embedded-deterministic``: PyTorch's deterministic algorithms, while the trainer computes and only then."""

import os
from dataclasses import replace

import pytest
import torch

from miles_core.data import Sample, collate
from miles_core.trainer import Callbacks, Loss, OptimizerConfig
from miles_embedded import load_model
from miles_embedded.trainer.deterministic import WORKSPACE, DeterministicTrainer, deterministic_algorithms
from miles_embedded.trainer.flash import FlashPlan, flash
from miles_embedded.trainer.packing import pack
from miles_embedded.trainer.trainer import TrainerConfig
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import make_batch


@pytest.fixture(autouse=True)
def no_workspace(monkeypatch):
    monkeypatch.setenv(WORKSPACE[0], "")
    monkeypatch.delenv(WORKSPACE[0])


def state():
    filled = torch.utils.deterministic.fill_uninitialized_memory
    return torch.get_deterministic_debug_mode(), filled


def test_the_mode_is_on_in_both_passes_and_off_afterwards(tmp_path):
    model = load_model(tiny_checkpoint("qwen3", tmp_path / "model"), "float32", "cpu")
    trainer, seen, before = DeterministicTrainer(model, TrainerConfig(OptimizerConfig())), [], state()

    def forward(*args):
        seen.append(("forward", *state()))
        return trainer.forward(*args)

    def loss(output, micro_batch, ctx):
        output.log_probs.register_hook(lambda grad: seen.append(("backward", *state())))
        return Loss(output.log_probs.sum())

    trainer.bind(Callbacks(forward, loss, trainer.optimizer_step))
    batch = make_batch()
    trainer.log_probs(batch, "old")
    assert set(seen) == {("forward", 2, False)}
    trainer.step(batch)
    assert {name for name, *_ in seen} == {"forward", "backward"} and {tuple(rest) for _, *rest in seen} == {(2, False)}
    assert state() == before and os.environ[WORKSPACE[0]] == WORKSPACE[1]


def test_the_mode_ends_with_an_error_and_keeps_the_users_workspace(monkeypatch):
    monkeypatch.setenv(WORKSPACE[0], ":16:8")
    before = state()
    with pytest.raises(ZeroDivisionError), deterministic_algorithms():
        assert state() == (2, False)
        1 / 0  # noqa: B018
    assert state() == before and os.environ[WORKSPACE[0]] == ":16:8"


@pytest.mark.parametrize("chosen", [True, False])
def test_the_flag_chooses_the_trainer(toy_run, chosen):
    run = toy_run(steps=1, embedded_deterministic=chosen)
    assert isinstance(run.trainer, DeterministicTrainer) is chosen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_flash_attention_repeat_on_a_gpu():
    rows = [(1500, 700), (1500, 900), (1500, 300)]  # a prompt of 1,500 tokens with three responses
    packing = pack(
        collate([Sample(tokens=[1] * sum(r), response_length=r[1], group_index=0, index=i) for i, r in enumerate(rows)])
    )
    packing = replace(packing, rows=packing.rows.cuda())
    generator, rows = torch.Generator("cuda").manual_seed(0), len(packing.rows)
    qkv = [torch.randn(rows, n, 64, device="cuda", generator=generator).bfloat16() for n in (8, 2, 2)]
    weight = torch.randn(rows, 8, 64, device="cuda", generator=generator).bfloat16()

    def gradients():
        leaves = [x.clone().requires_grad_() for x in qkv]
        return torch.autograd.grad((flash(*leaves, FlashPlan(packing), 0.125) * weight).sum(), leaves)

    with deterministic_algorithms():
        fixed = [gradients() for _ in range(8)]
    assert all(torch.equal(a, b) for found in fixed[1:] for a, b in zip(fixed[0], found, strict=True))
    free = [gradients()[0] for _ in range(8)]
    assert any(not torch.equal(free[0], other) for other in free[1:])  # otherwise the test above shows nothing
