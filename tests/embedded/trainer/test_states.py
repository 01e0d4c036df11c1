"""States of layers in training: samples packed in one row do not affect each other."""

from __future__ import annotations

import pytest

from miles_core.contracts.trainer import Callbacks
from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.load import load_model
from miles_embedded.testing.families import family_checkpoint, lacking
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig

pytestmark = pytest.mark.skipif(bool(lacking("qwen3_next")), reason=lacking("qwen3_next"))

#: Two groups that share a prompt, with branches of one and several tokens, and samples alone.
SAMPLES = [
    ([3, 4, 5], [6, 7], 0),
    ([3, 4, 5], [8, 9, 10, 11], 0),
    ([12], [13, 14], 1),
    ([12], [15, 16, 17], 1),
    ([18, 19], [20] * 9, 2),
]


def gradients(model, chosen):
    """Gradient of the sum of the log-probs of these samples, packed in one row."""
    samples = [
        Sample(tokens=[*p, *r], response_length=len(r), group_index=g, index=i) for i, (p, r, g) in enumerate(chosen)
    ]
    trainer = EmbeddedTrainer(model, TrainerConfig(OptimizerConfig()))
    trainer.bind(Callbacks(trainer.forward, None, trainer.optimizer_step))
    batch = collate(samples)
    micro, ctx = trainer.prepare(batch, list(range(len(batch))), "train", False)
    model.zero_grad()
    trainer.forward(model, micro, ctx).log_probs.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "lfm2"])
def test_a_packed_gradient_is_the_sum_of_those_of_its_samples(family, tmp_path):
    model = load_model(family_checkpoint(family, tmp_path / "model"), "float32")
    packed = gradients(model, SAMPLES)
    alone = [gradients(model, [sample]) for sample in SAMPLES]
    for name, found in packed.items():
        expected = sum(each[name] for each in alone if name in each)
        assert (found - expected).abs().max() <= 1e-4 * max(float(expected.abs().max()), 1e-2), name
