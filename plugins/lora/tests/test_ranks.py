"""Adapters on several ranks give what one process gives, over a plain and over an encoded base."""

from __future__ import annotations

import pytest
import torch

from miles_core.trainer import Callbacks, OptimizerConfig
from miles_embedded import encode_weights, load_model, mark_constant
from miles_embedded.trainer.build import data_parallel
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_formats import FormatCodec
from miles_lora import LoraOptions
from miles_lora.adapter import attach
from miles_lora.hooks import Trained, merge
from miles_lora.targets import find_targets
from miles_testing.doubles.pair_format import PairFormat
from miles_testing.ranked_trainer_contract import SHARES, WHOLE, part
from miles_testing.tiny import tiny_checkpoint
from miles_testing.yardstick import weighted


def train(checkpoint, strategy, base, share, directory=None, load=False):
    """Merged weights, adapters of the stream and exported base after two steps."""
    encode = None if base == "plain" else lambda model: encode_weights(model, FormatCodec(PairFormat()))
    model = load_model(checkpoint, reduce=encode)
    mark_constant(model.parameters(), streamed=False)
    options = LoraOptions(rank=4, target_modules=("all-linear", "all-experts"))
    targets = find_targets(model, options.target_modules)
    trained = Trained(model, targets, attach(targets, options, "0", raw_inputs=False), options)
    parallel = data_parallel(strategy, torch.device("cpu"))
    config = TrainerConfig(optimizer=OptimizerConfig(lr=1e-2), recompute=base == "recomputed")
    trainer = EmbeddedTrainer(model, config, None, None, parallel)
    trainer.bind(Callbacks(trainer.forward, weighted, trainer.optimizer_step))
    if load:
        trainer.load(directory)
    else:
        for _ in range(2):
            trainer.step(part(share))
        if directory is not None:
            trainer.save(directory)
    streamed = {n: t.clone() for unit in trainer.units(everywhere=True) for n, t in unit.tensors.items()}
    assert streamed and all(".lora." in name for name in streamed)
    merged = {n: t.clone() for unit in merge(trained, trained.base()) for n, t in unit.tensors.items()}
    return streamed, merged


@pytest.mark.parametrize(
    ("strategy", "base"), [("full_shard", "plain"), ("full_shard", "encoded"), ("no_shard", "recomputed")]
)
def test_two_ranks_train_adapters_as_one_process_does(ranks, tmp_path, strategy, base):
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "model")
    expected = train(checkpoint, "no_shard", base, WHOLE)
    start = train(checkpoint, "no_shard", base, [])
    found = ranks.run(
        train, each=[(checkpoint, strategy, base, share, tmp_path / "saved") for share in SHARES["unequal"]]
    )
    for result in found:
        for ours, theirs, before in zip(result, expected, start, strict=True):
            assert ours.keys() == theirs.keys()
            for name, tensor in ours.items():
                torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)
            assert any(not torch.allclose(ours[name], before[name], atol=1e-3) for name in ours)
    streamed, _ = train(checkpoint, "no_shard", base, [], tmp_path / "saved", load=True)
    assert all(torch.equal(streamed[name], tensor) for name, tensor in found[0][0].items())
