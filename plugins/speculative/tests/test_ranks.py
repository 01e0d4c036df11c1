"""Training the draft on several ranks gives what one process gives."""

from __future__ import annotations

import pytest
import torch

from miles_core.backend import Callbacks, OptimizerConfig
from miles_core.testing.ranked_trainer_contract import SHARES, WHOLE, part
from miles_core.testing.yardstick import weighted
from miles_embedded import load_model
from miles_embedded.trainer.build import data_parallel
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_speculative.config import SpeculativeConfig
from miles_speculative.head import attach
from miles_speculative.training import DraftTraining, check_ranks


def trained(checkpoint, strategy, share, renew=False):
    """The exported weights after two steps with a loss of the draft in each."""
    model = load_model(checkpoint)
    options = SpeculativeConfig(mtp_training=True, sft_interval=2, draft_lr=1e-2)
    draft = DraftTraining(attach(model, checkpoint), options, 1.0)
    parallel = data_parallel(strategy, torch.device("cpu"))
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.1))
    trainer = EmbeddedTrainer(model, config, None, None, parallel)

    steps = []

    def forward(chunk, micro_batch, ctx):
        output = trainer.forward(chunk, micro_batch, ctx)
        output.aux.update(draft.losses(micro_batch, ctx, len(steps)))
        return output

    trainer.bind(Callbacks(forward, weighted, trainer.optimizer_step))
    for _ in range(2):
        steps.append(trainer.step(part(share)))
    if renew:
        draft.renew()
    return {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_two_ranks_train_the_draft_as_one_process_does(ranks, mtp_checkpoint, strategy):
    checkpoint = mtp_checkpoint()
    whole = trained(checkpoint, "no_shard", WHOLE)
    for found in ranks.run(trained, each=[(checkpoint, strategy, share) for share in SHARES["unequal"]]):
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            torch.testing.assert_close(found[name], tensor, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    if strategy == "full_shard":
        with pytest.raises(AssertionError, match="among 2 ranks: add --sharding-strategy no_shard"):
            ranks.run(check_ranks, each=[(SpeculativeConfig(mtp_training=True, ema_decay=0.5), strategy)] * 2)


def test_a_start_anew_on_one_process_is_the_policys_last_layer(mtp_checkpoint):
    found = trained(mtp_checkpoint(), "no_shard", WHOLE, renew=True)
    last = {n: t for n, t in found.items() if n.startswith("model.layers.1.")}
    assert len(last) > 5
    for name, tensor in last.items():
        assert torch.equal(found[name.replace("layers.1.", "layers.2.")], tensor)
