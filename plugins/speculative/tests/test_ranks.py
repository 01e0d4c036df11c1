"""Training the draft on several ranks gives what one process gives: losses, running mean, a new start, checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from miles_core.plugin import Store
from miles_core.trainer import Callbacks, OptimizerConfig
from miles_embedded import load_model
from miles_embedded.trainer.build import data_parallel
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_speculative.config import SpeculativeConfig
from miles_speculative.embedded import EmbeddedSpeculative
from miles_testing.ranked_trainer_contract import SHARES, WHOLE, part
from miles_testing.yardstick import weighted

POLICY = SimpleNamespace(name="policy", hf_checkpoint="")


class Side:
    """A trainer with a draft, as a run has it."""

    def __init__(self, checkpoint, strategy):
        model = load_model(checkpoint)
        options = SpeculativeConfig(mtp_training=True, sft_interval=2, draft_lr=1e-2, ema_decay=0.5, reinit_interval=2)
        self.hooks = EmbeddedSpeculative(options)
        config = SimpleNamespace(
            run=SimpleNamespace(engine="embedded"),
            model=SimpleNamespace(ref_load=None, hf_checkpoint=checkpoint),
            rollout=SimpleNamespace(temperature=1.0),
        )
        self.run = SimpleNamespace(step=0, config=config)
        self.hooks.on_model(self.run, POLICY, model, "train")
        parallel = data_parallel(strategy, torch.device("cpu"))
        config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.1))
        self.trainer = trainer = EmbeddedTrainer(model, config, None, None, parallel)
        forward = self.hooks.wrap_forward(self.run, POLICY)(trainer.forward)
        trainer.bind(Callbacks(forward, weighted, self.hooks.wrap_optimizer_step(POLICY)(trainer.optimizer_step)))

    def steps(self, count, share):
        for _ in range(count):
            self.hooks.on_batch(self.run, POLICY)
            self.trainer.step(part(share))
            self.run.step += 1
        return self

    def weights(self):
        """What the trainer has, and the means that an engine would get."""
        own, sent = (
            {n: t.clone() for unit in units for n, t in unit.tensors.items()}
            for units in (
                self.trainer.units(everywhere=True),
                self.hooks.wrap_weights(POLICY)(lambda: self.trainer.units(everywhere=True))(),
            )
        )
        assert own.keys() == sent.keys()
        moved = {n for n in own if not torch.equal(own[n], sent[n])}
        assert moved and all(n.startswith("model.layers.2.") for n in moved)
        return own | {f"sent.{n}": sent[n] for n in moved}

    def save(self, directory):
        self.trainer.save(directory / "trainer")
        self.hooks.on_save(POLICY, Store(directory / "plugins", self.trainer.world))

    def load(self, directory):
        self.trainer.load(directory / "trainer")
        self.hooks.on_load(POLICY, Store(directory / "plugins", self.trainer.world))
        return self


def trained(checkpoint, strategy, share, directory=None):
    """After two steps, and after a third that begins with a new start."""
    side = Side(checkpoint, strategy).steps(2, share)
    if directory is not None:
        side.save(directory)
    return [side.weights(), side.steps(1, share).weights()]


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
def test_two_ranks_train_the_draft_as_one_process_does(ranks, mtp_checkpoint, tmp_path, strategy):
    checkpoint = mtp_checkpoint()
    expected = trained(checkpoint, "no_shard", WHOLE)
    found = ranks.run(trained, each=[(checkpoint, strategy, share, tmp_path) for share in SHARES["unequal"]])
    for one in found:
        for ours, theirs in zip(one, expected, strict=True):
            same(ours, theirs, atol=1e-4, rtol=1e-3)
    loaded = Side(checkpoint, "no_shard").load(tmp_path)
    same(loaded.weights(), found[0][0], atol=0, rtol=0)


def same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, **tolerance, msg=lambda m, n=name: f"{n}: {m}")


def test_a_start_anew_is_the_policys_last_layer(mtp_checkpoint):
    side = Side(mtp_checkpoint(), "no_shard").steps(2, WHOLE)
    side.hooks.on_batch(side.run, POLICY)
    found = {n: t for unit in side.trainer.units() for n, t in unit.tensors.items()}
    last = {n: t for n, t in found.items() if n.startswith("model.layers.1.")}
    assert len(last) > 5
    for name, tensor in last.items():
        assert torch.equal(found[name.replace("layers.1.", "layers.2.")], tensor)
