"""The load-balancing loss against the formula written out."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles_core.contracts.trainer import Callbacks, Loss
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.experts import routed_blocks
from miles_embedded.model.load import load_model
from miles_embedded.trainer.balance import Balance
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.tiny import tiny_checkpoint


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_loss_is_the_formula(family, tmp_path):
    checkpoint = tiny_checkpoint(family, tmp_path / family)
    model = load_model(checkpoint, "float32")
    samples = [Sample(tokens=[5, 6, 7, 8, 9][: 3 + n], response_length=n, index=n) for n in (1, 2)]
    batch = collate(samples)
    trainer = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig(), aux_loss_coef=0.1))
    trainer.bind(Callbacks(trainer.forward, lambda o, m, c: Loss(o.log_probs.sum() * 0), trainer.optimizer_step))
    total, tokens = trainer.step(batch)["train/load_balance"]

    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    sigmoid = family == "deepseek_v3"
    expected = 0.0
    for sample in samples:
        seen = []
        handles = [
            r.router.register_forward_hook(lambda m, a, o, s=seen: s.append(o if isinstance(o, torch.Tensor) else o[0]))
            for r in routed_blocks(plain)
        ]
        chosen = []
        handles += [
            r.experts.register_forward_pre_hook(lambda m, a, s=chosen: s.append(a[1])) for r in routed_blocks(plain)
        ]
        with torch.no_grad():
            plain(torch.tensor([sample.tokens[:-1]]))
        for handle in handles:
            handle.remove()
        for logits, index in zip(seen, chosen, strict=True):
            count, experts = logits.shape
            scores = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True) if sigmoid else logits.softmax(1)
            for e in range(experts):
                frequency = experts / (index.shape[1] * count) * int((index == e).sum())
                expected += 0.1 * sample.response_length * frequency * float(scores[:, e].mean())
    assert tokens == 3
    assert total == pytest.approx(expected, rel=1e-4)


def test_nothing_is_recorded_outside_of_a_training_pass(tmp_path):
    model = load_model(tiny_checkpoint("qwen3_moe", tmp_path / "moe"), "float32")
    trainer = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig(), aux_loss_coef=0.1))
    states = []
    inner = trainer.forward
    trainer.bind(Callbacks(lambda *a: (states.append(a[2].attached), inner(*a))[1], None, trainer.optimizer_step))
    trainer.log_probs(collate([Sample(tokens=[5, 6, 7], response_length=1)]), "old")
    assert states and not any("load_balance" in s for s in states)


def test_routers_of_every_family_are_found(tmp_path):
    for family, expected in (("qwen3_moe", 2), ("deepseek_v3", 1), ("llama", 0)):
        assert len(routed_blocks(load_model(tiny_checkpoint(family, tmp_path / family)))) == expected
    assert Balance(load_model(tiny_checkpoint("qwen3_moe", tmp_path / "again")), 0.1).coefficient == 0.1
