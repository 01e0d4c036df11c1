"""The embedded trainer on several ranks: replicated and fully sharded."""

import pytest
import torch

from miles_core.contracts.emulation import Emulation
from miles_core.contracts.trainer import Callbacks
from miles_core.errors import CheckpointError
from miles_core.precision.snapshot import snapshot
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.model.load import load_model
from miles_embedded.quantized.activation import encoded_views
from miles_embedded.quantized.weights import install
from miles_embedded.testing.families import family_checkpoint
from miles_embedded.trainer.build import data_parallel
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_formats.codec import FormatCodec
from miles_testing.doubles.pair_format import PairFormat
from miles_testing.ranked_trainer_contract import SHARES, WHOLE, RankedTrainerContract, part
from miles_testing.tiny import tiny_checkpoint
from miles_testing.trainer_contract import Setup
from miles_testing.yardstick import make_batch, weighted


def build(strategy, checkpoint, setup, dtype="float32", format=None, **changes):
    config = TrainerConfig(
        optimizer=OptimizerConfig(
            lr=setup.lr, weight_decay=setup.weight_decay, betas=setup.betas, eps=setup.eps, clip_grad=setup.clip_grad
        ),
        temperature=setup.temperature,
        micro_batch_size=setup.micro_batch_size,
        max_tokens=setup.max_tokens,
        **({"recompute": setup.recompute, "entropy": setup.entropy} | changes),
    )
    model = load_model(checkpoint, dtype)
    if format is not None:
        install(model, FormatCodec(format))
    parallel = data_parallel(strategy, torch.device("cpu"))
    trainer = EmbeddedTrainer(model, config, lambda: load_model(checkpoint, dtype), None, parallel)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    return trainer


class TestReplicated(RankedTrainerContract):
    def make(self, checkpoint, setup):
        return build("no_shard", checkpoint, setup)


class TestFullyShard(RankedTrainerContract):
    def make(self, checkpoint, setup):
        return build("full_shard", checkpoint, setup)


class Recomputing(TestFullyShard):
    """With recomputation, and the two losses and metrics that routers have."""

    def make(self, checkpoint, setup):
        return build("full_shard", checkpoint, setup, aux_loss_coef=0.5, entropy=True, recompute=True)


class Quantised(TestFullyShard):
    """In a number format; a rounding may fall to the other side after a step."""

    atol = 2e-3

    def make(self, checkpoint, setup):
        return build("full_shard", checkpoint, setup, format=PairFormat())


#: llama ties its head to its embeddings, gpt-oss has biases and other strides, DeepSeek's indexer gets no gradient, Nemotron-H and Jamba keep
#: states
@pytest.mark.parametrize(
    ("suite", "family"),
    [
        (TestFullyShard, "llama"),
        (TestFullyShard, "gpt_oss"),
        (TestFullyShard, "deepseek_v32"),
        (Recomputing, "qwen3_moe"),
        (Quantised, "qwen3_moe"),
        (Quantised, "gpt_oss"),
        (Recomputing, "nemotron_h"),
        (TestFullyShard, "jamba"),
    ],
)
def test_other_models_compute_the_same(ranks, suite, family, tmp_path):
    checkpoint = family_checkpoint(family, tmp_path / "checkpoint")
    suite().test_ranks_compute_what_one_process_computes(ranks, checkpoint, SHARES["unequal"])


def state_of(checkpoint, dtype, share, directory=None, load=None):
    """Masters and optimiser of a rank after a step, saved or loaded."""
    trainer = build("full_shard", checkpoint, Setup(), dtype)
    if load is None:
        trainer.step(part(share))
        trainer.save(directory)
    else:
        trainer.load(load)
    return {n: t.clone() for n, t in trainer.optimizer.tensors().items()}


def test_masters_and_moments_are_divided_anew(ranks, tmp_path):
    checkpoint = tiny_checkpoint("llama", tmp_path / "checkpoint")
    saved = ranks.run(state_of, checkpoint, "bfloat16", each=[(s, tmp_path / "two") for s in SHARES["unequal"]])
    one = state_of(checkpoint, "bfloat16", [], load=tmp_path / "two")
    three = ranks.run(state_of, checkpoint, "bfloat16", [], None, tmp_path / "two", size=3)
    for name, whole in one.items():
        for parts in (saved, three):
            rows = [p[name] for p in parts]
            assert torch.equal(torch.cat(rows) if whole.dim() else rows[0], whole), name
    # bfloat16 gradients are rounded once more where they are summed over ranks
    alone = state_of(checkpoint, "bfloat16", WHOLE, tmp_path / "one")
    assert alone.keys() == one.keys() and any(name.startswith("master.") for name in one)
    for kind in ("exp_avg.", "master."):
        found, expected = (torch.cat([t.flatten() for n, t in x.items() if n.startswith(kind)]) for x in (one, alone))
        assert 0 < (found - expected).norm() < 0.02 * expected.norm()


def test_a_file_that_is_missing_is_named(ranks, tmp_path):
    checkpoint = tiny_checkpoint("llama", tmp_path / "checkpoint")
    ranks.run(state_of, checkpoint, "float32", each=[(s, tmp_path / "two") for s in SHARES["unequal"]])
    (tmp_path / "two" / "model.1-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.1-of-2\.safetensors is missing"):
        state_of(checkpoint, "float32", [], load=tmp_path / "two")


def scored(checkpoint, share):
    """Log-probs with encoded weights, with those of an earlier version, in a wider type, and as before."""
    trainer, batch, codec = build("full_shard", checkpoint, Setup()), part(share), FormatCodec(PairFormat())
    encoded_views(trainer.model, codec)
    earlier = snapshot(trainer.units(everywhere=True), codec, 0)
    trainer.step(batch)
    found = []
    for emulation in (
        Emulation(encoded=True),
        Emulation(snapshot=True),
        Emulation(encoded=True, wider=True),
        Emulation(),
    ):
        with trainer.emulate(emulation, codec, earlier):
            found.append(trainer.log_probs(batch, "verify")["log_probs"].float())
    return found


def test_emulation_is_that_of_one_process(ranks, tmp_path):
    checkpoint = tiny_checkpoint("gpt_oss", tmp_path / "checkpoint")
    one = scored(checkpoint, WHOLE)
    assert not torch.allclose(one[0], one[3]) and not torch.allclose(one[0], one[1])
    batch = make_batch()
    batch.columns |= {str(i): column for i, column in enumerate(one)}
    for share, found in zip(
        SHARES["empty"], ranks.run(scored, checkpoint, each=[(s,) for s in SHARES["empty"]]), strict=True
    ):
        for i, column in enumerate(found):
            torch.testing.assert_close(column, batch.select(share).column(str(i)), rtol=0, atol=2e-3)
