"""Optimizers whose state is divided among ranks give what one process gives, and their checkpoints change the number of ranks."""

from __future__ import annotations

import torch

from miles_core.trainer import Callbacks, OptimizerConfig
from miles_embedded import load_model
from miles_embedded.trainer.build import data_parallel
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_optimizers.adamw8bit import EightBitAdamW
from miles_optimizers.host import HostAdamW
from miles_testing.ranked_trainer_contract import SHARES, WHOLE, part
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import weighted

CONFIG = OptimizerConfig(lr=1e-2)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=CONFIG.lr, betas=CONFIG.betas, eps=CONFIG.eps)


MAKERS = {
    "adamw8bit": lambda groups: EightBitAdamW(groups, adamw, CONFIG),
    "adamw-offload": lambda groups: HostAdamW(groups, CONFIG),
}


def train(checkpoint, strategy, share, directory, load=False):
    """The state of each optimizer after two steps, or in a checkpoint."""
    states = {}
    for name, make in MAKERS.items():
        parallel = data_parallel(strategy, torch.device("cpu"))
        config = TrainerConfig(CONFIG, offload_optimizer=True)
        trainer = EmbeddedTrainer(load_model(checkpoint, "bfloat16"), config, None, None, parallel, make)
        trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
        if load:
            trainer.load(directory / name)
        else:
            for _ in range(2):
                trainer.step(part(share))
            trainer.save(directory / name)
        with trainer.optimizer.on_device():
            states[name] = {n: t.clone() for n, t in trainer.optimizer.tensors().items()}
    return states


def test_shards_are_saved_and_joined(ranks, tmp_path):
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    expected = train(checkpoint, "no_shard", WHOLE, tmp_path / "one")
    found = ranks.run(train, each=[(checkpoint, "full_shard", share, tmp_path / "two") for share in SHARES["unequal"]])
    joined = train(checkpoint, "no_shard", WHOLE, tmp_path / "two", load=True)
    for name in MAKERS:
        one, both = expected[name], [each[name] for each in found]
        assert joined[name].keys() == one.keys()
        for key, tensor in joined[name].items():
            parts = [each[key] for each in both if key in each]
            assert torch.equal(tensor, torch.cat(parts) if tensor.dim() else parts[0])
            if key.startswith("master."):
                assert (tensor - one[key]).norm() < 2e-2 * one[key].norm()  # BF16 gradients are summed in another order
        divided = [key for key in both[0] if key.startswith(("exp_avg_scale", "exp_avg."))]
        assert any(both[0][key].shape != one[key].shape for key in divided)
