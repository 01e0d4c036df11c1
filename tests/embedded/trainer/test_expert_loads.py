"""Expert loads against counting by hand."""

import pytest
import torch

from miles_core.contracts.trainer import Callbacks, Loss
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.observe.standard_hints import HINTS
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.experts import routed_blocks
from miles_embedded.model.load import load_model
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.tiny import tiny_checkpoint

NAME = "train/expert_imbalance"


def samples():
    """Two groups whose siblings share their prompt, so that packing computes its rows once where they meet."""
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    return [
        Sample(tokens=[*prompts[g], *range(12 + 3 * i, 12 + 4 * i + n)], response_length=i + n, index=i, group_index=g)
        for i, (g, n) in enumerate([(0, 3), (0, 4), (1, 2), (1, 3)])
    ]


def trainer_of(model, **settings):
    trainer = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig(), **settings))
    trainer.bind(Callbacks(trainer.forward, lambda o, m, c: Loss(o.log_probs.sum() * 0.0), trainer.optimizer_step))
    return trainer


def by_hand(model, made):
    """max / mean load of the worst layer, from one forward a sample of what it needs (all but its last token)."""
    worst = []
    chosen = [[] for _ in routed_blocks(model)]
    handles = [
        r.experts.register_forward_pre_hook(lambda m, a, s=s: s.append(a[1]))
        for r, s in zip(routed_blocks(model), chosen, strict=True)
    ]
    trainer = trainer_of(model, micro_batch_size=1, share_prompts=False)
    for sample in made:
        trainer.log_probs(collate([sample]), "old")
    for handle in handles:
        handle.remove()
    for found, seen in zip(routed_blocks(model), chosen, strict=True):
        loads = torch.bincount(torch.cat(seen).flatten(), minlength=found.count).double()
        worst.append(float(loads.max() / loads.mean()))
    return max(worst)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("settings", [{"micro_batch_size": 1}, {"micro_batch_size": 4}, {"recompute": True}])
def test_it_is_the_largest_load_over_the_mean_however_the_step_is_split(family, settings, tmp_path):
    model = load_model(tiny_checkpoint(family, tmp_path / family), "float32")
    expected = by_hand(model, samples())
    trainer = trainer_of(model, **settings)
    value, weight = trainer.step(collate(samples()))[NAME]
    assert (value, weight) == (pytest.approx(expected), 1.0)
    assert 1 < value <= 2  # 4 experts, 2 a token


def test_each_step_is_counted_by_itself(tmp_path):
    model = load_model(tiny_checkpoint("qwen3_moe", tmp_path / "moe"), "float32")
    trainer = trainer_of(model)
    first = trainer.step(collate(samples()), lr=0.0)[NAME]
    trainer.log_probs(collate(samples()[:1]), "old")  # other passes count nothing
    assert trainer.step(collate(samples()), lr=0.0)[NAME] == first


def test_one_expert_for_all_is_the_worst(tmp_path):
    model = load_model(tiny_checkpoint("qwen3_moe", tmp_path / "moe", num_experts_per_tok=1), "float32")
    for found in routed_blocks(model):
        found.experts.register_forward_pre_hook(lambda m, a: (a[0], torch.zeros_like(a[1]), a[2]))
        assert found.count == 4
    assert trainer_of(model).step(collate(samples()))[NAME] == (4.0, 1.0)


def test_a_dense_model_has_none(tmp_path):
    model = load_model(tiny_checkpoint("llama", tmp_path / "llama"), "float32")
    assert NAME not in trainer_of(model).step(collate(samples()))


def test_the_hint_waits_for_this_metric(toy_run):
    assert toy_run(steps=1).metrics[0][NAME] >= 1
    (hint,) = [h for h in HINTS if h.name == "expert-imbalance"]
    assert hint.metric == "*/expert_imbalance"
