"""Log-probabilities of two ranks that divide a model (FSDP2) are, bit for bit, those of one process."""

import pytest
import torch
from torch import distributed

from miles_core.trainer import Callbacks, OptimizerConfig
from miles_embedded import load_model
from miles_embedded.trainer.build import data_parallel
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing.ranked_trainer_contract import SHARES, WHOLE, part
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import weighted
from miles_true_on_policy.hooks import make_invariant


def score(checkpoint, strategy, share, micro_batch, exact, device="cpu"):
    model = load_model(checkpoint, "float32" if device == "cpu" else "bfloat16", device)
    if exact:
        make_invariant(model)
    config = TrainerConfig(OptimizerConfig(), micro_batch_size=micro_batch)
    trainer = EmbeddedTrainer(model, config, None, None, data_parallel(strategy, torch.device(device)))
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer.log_probs(part(share), "old")["log_probs"].cpu()


def score_over_nccl(meeting, *args):
    """``score`` on the rank's GPU, in a group that communicates over NCCL."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    distributed.destroy_process_group()
    torch.cuda.set_device(rank)
    distributed.init_process_group("cpu:gloo,cuda:nccl", f"file://{meeting}", rank=rank, world_size=size)
    return score(*args, f"cuda:{rank}")


def test_two_ranks_compute_the_bits_of_one_process(ranks, tmp_path):
    checkpoint, shares = tiny_checkpoint("qwen3_moe", tmp_path / "model"), SHARES["unequal"]
    for exact in (True, False):
        one = score(checkpoint, "no_shard", WHOLE, 12, exact)
        found = ranks.run(score, each=[(checkpoint, "full_shard", share, 3, exact) for share in shares])
        both = torch.cat(found)
        assert torch.equal(both, one) == exact


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_compute_the_bits_of_one(ranks, tmp_path):
    checkpoint, shares = tiny_checkpoint("qwen3_moe", tmp_path / "model"), SHARES["unequal"]
    for exact in (True, False):
        one = score(checkpoint, "no_shard", WHOLE, 12, exact, "cuda:0")
        meeting = tmp_path / f"meeting-{exact}"
        found = ranks.run(
            score_over_nccl, each=[(meeting, checkpoint, "full_shard", share, 3, exact) for share in shares]
        )
        assert torch.equal(torch.cat(found), one) == exact
