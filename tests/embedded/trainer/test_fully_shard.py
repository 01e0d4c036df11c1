"""Modules that plugins add, and towers that read images, are divided among ranks: two ranks learn what one process learns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miles_core.config.load import load
from miles_core.data.batch import means
from miles_core.data.sample import Sample
from miles_core.run.make import make_run
from miles_core.run.prepare import apply_plan, prepare
from miles_core.train.data_shard import merge_metrics, split_by_replica
from miles_core.train.rank import Rank
from miles_embedded.model.image_processor import make_processor
from miles_embedded.testing.images import image, vision_checkpoint, vision_tokenizer
from miles_testing.toy import toy_arguments
from miles_testing.yardstick import copy_weights

#: A value head at the root of the model, whose output reaches the loss beside the forward's result.
VALUES = """
import torch
from torch import nn
from miles_core.plugin import hookimpl
from miles_core.trainer import Loss

@hookimpl
def on_model(model, role):
    if role == "train":
        like = next(model.parameters())
        model.value_head = nn.Linear(model.config.hidden_size, 1, dtype=torch.float32)
        nn.init.constant_(model.value_head.weight, 0.01)
        nn.init.zeros_(model.value_head.bias)

@hookimpl
def wrap_forward(policy):
    def wrap(inner):
        def forward(chunk, micro_batch, ctx):
            seen = []
            hook = chunk.model.norm.register_forward_hook(lambda module, given, out: seen.append(out[0]))
            output = inner(chunk, micro_batch, ctx)
            hook.remove()
            values = chunk.value_head(seen[0].float())[:, 0]
            ctx.attached["value"] = ctx.at_targets(values, len(micro_batch.tokens))
            return output
        return forward
    return wrap

@hookimpl
def wrap_loss(policy):
    def wrap(inner):
        def loss(output, batch, ctx):
            own = inner(output, batch, ctx)
            error = ((ctx.attached["value"] - 1).square() * batch.column("loss_weight")).sum()
            return Loss(error + own.value, {**own.metrics, "value/loss": (error.detach(), torch.ones(()))})
        return loss
    return wrap
"""

#: Adapters of two projections; the model itself is frozen, and adapters are in float32 whatever the model is in.
ADAPTERS = """
import torch
from torch import nn
from miles_core.plugin import hookimpl

class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.full((4, base.in_features), 0.01))
        self.b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x):
        return self.base(x) + (x.to(self.a.dtype) @ self.a.T @ self.b.T).to(x.dtype)

@hookimpl
def on_model(model, role):
    if role == "train":
        model.requires_grad_(False)
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
"""


def rollout(groups):
    random = np.random.default_rng(0)
    return [
        Sample(
            tokens=random.integers(3, 30, 9).tolist(),
            response_length=int(random.integers(2, 6)),
            reward=float(random.normal()),
            group_index=n // 4,
            index=n,
        )
        for n in range(4 * groups)
    ]


def rollout_with_images(tokenizer, processor):
    samples = rollout(3)
    for sample in samples:
        sample.media = (image(sample.group_index),)
        prompt = tokenizer.encode(processor.expand("A<|vision_start|><|image_pad|><|vision_end|>", sample.media))
        sample.tokens = [*prompt, *sample.tokens[-sample.response_length :]]
    return samples


def learned(words, directory, samples):
    config = load(words)
    accepted, catalogue = prepare(config)
    run = make_run(apply_plan(config, accepted), accepted, catalogue, directory)
    rank = Rank(run, run.policy, run.hooks.make("trainer", "embedded", run=run, policy=run.policy))
    share = split_by_replica(samples, config.train, rank.world.replicas)[rank.world.replica]
    pairs, _ = rank.learn(share, 0)
    rank.learn(share, 1)
    return pairs, copy_weights(rank.trainer)


@pytest.mark.parametrize(
    ("plugin", "dtype"), [(VALUES, "float32"), (ADAPTERS, "float32"), (VALUES, "bfloat16"), (ADAPTERS, "bfloat16")]
)
def test_modules_of_plugins_are_divided_too(ranks, plugin, dtype, tmp_path):
    (tmp_path / "plugin.py").write_text(plugin)
    words = toy_arguments([str(tmp_path / "plugin.py")], tmp_path / "run", dtype=dtype, lr=1e-2, adam_eps=1e-2)
    pairs, weights = learned(words, tmp_path, rollout(3))
    found = ranks.run(learned, words, tmp_path, rollout(3))
    metrics, expected = merge_metrics([p for p, _ in found]), means(pairs)
    exact = dtype == "float32"
    for name in ("train/grad_norm", "train/loss"):
        assert metrics[name] == pytest.approx(expected[name], rel=2e-4 if exact else 2e-2, abs=1e-5 if exact else 1e-3)
    assert expected["train/grad_norm"] > 0
    for name, tensor in weights.items():
        torch.testing.assert_close(found[0][1][name], tensor, rtol=0, atol=1e-4 if exact else 2e-2)


@pytest.mark.parametrize(("strategy", "tower"), [("full_shard", False), ("full_shard", True), ("no_shard", True)])
def test_images_are_read_by_every_rank(ranks, strategy, tower, tmp_path):
    checkpoint, tokenizer = vision_checkpoint("qwen2_5_vl", tmp_path / "model"), vision_tokenizer("qwen2_5_vl")
    samples = rollout_with_images(tokenizer, make_processor(checkpoint, tokenizer))
    options = {"hf_checkpoint": checkpoint, "media": True, "train_vision_tower": tower, "sharding_strategy": strategy}
    options |= {"dtype": "float32", "lr": 1e-2, "adam_eps": 1e-2, "prompt_data": None, "label_key": None}
    words = toy_arguments([], tmp_path / "run", **options)
    pairs, weights = learned(words, tmp_path, samples)
    found = ranks.run(learned, words, tmp_path, samples)
    metrics, expected = merge_metrics([p for p, _ in found]), means(pairs)
    assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=2e-4)
    for name, tensor in weights.items():
        torch.testing.assert_close(found[0][1][name], tensor, rtol=0, atol=1e-4)
