"""A micro-batch never waits for the GPU, so that the host prepares the next one while the GPU computes."""

import numpy as np
import pytest
import torch

from miles_core.data.batch import collate, to_device
from miles_core.data.sample import Sample
from miles_core.trainer import Callbacks
from miles_embedded.model.load import load_model
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import weighted


def make_batch(groups=4):
    draw, samples = np.random.default_rng(0), []
    for group in range(groups):
        prompt = draw.integers(2, 60, 9).tolist()
        for sample in range(2):
            tokens = prompt + draw.integers(2, 60, 12 + sample).tolist()
            samples.append(
                Sample(tokens=tokens, response_length=12 + sample, group_index=group, index=2 * group + sample)
            )
    batch = collate(samples)
    batch.columns["weight"] = torch.ones(len(batch.tokens))
    return batch


def test_a_batch_on_its_own_device_is_not_copied():
    batch = make_batch(1)
    assert batch.to("cpu").tokens is batch.tokens and to_device(batch.tokens, "cpu") is batch.tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_forward_and_backward_wait_for_nothing(tmp_path, family):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
    model = load_model(tiny_checkpoint(family, tmp_path, **sizes), "bfloat16", "cuda")
    trainer = EmbeddedTrainer(model, TrainerConfig(micro_batch_size=2))
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    batch = make_batch()
    trainer.step(batch, lr=1e-3)  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _, micro_batch, ctx in trainer.micro_batches(batch, "train", False):
            weighted(trainer.forward(trainer.model, micro_batch, ctx), micro_batch, ctx).value.backward()
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.zeros(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
