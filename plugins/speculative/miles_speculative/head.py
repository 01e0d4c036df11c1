"""A multi-token-prediction layer in the layout of DeepSeek-V3 (arXiv 2412.19437, section 2.2).

From the hidden state that predicted a token, and that token's embedding, it predicts the next one: both are normed, joined and projected,
one decoder block follows, and the model's own head reads the result. Here the entry at position t has token t and the hidden state of
t - 1, so that its keys and values stand in the cache where the model's stand. The first token has no hidden state before it; zeros
take its place, in training too.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from miles_embedded import (
    add_layer,
    backbone,
    decoder_layers,
    gather_tensor,
    local_shard,
    new_layer,
    read_layer,
    run_layer,
)
from miles_speculative.draft import Draft

#: Copies of the model's own embedding and head that some checkpoints hold, in ours they are shared.
SHARED = ("embed_tokens.weight", "shared_head.head.weight")


class Head(Draft):
    """One model's MTP layer; ``module`` is the block, and in it ``enorm``, ``hnorm``, ``eh_proj`` and ``shared_head.norm``."""

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, call: Any) -> Tensor:
        """See ``Draft``; what is returned is behind the layer's last norm."""
        layer = self.module
        embedded = self.policy.get_input_embeddings()(tokens).detach()
        joined = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], -1))
        out: Tensor = layer.shared_head.norm(run_layer(self.policy, layer, joined, positions, call))
        return out


def make_layer(model: nn.Module) -> nn.Module:
    """A fresh MTP layer for ``model``, not yet part of it: a block like the model's last with the four parts beside it."""
    layer: Any = new_layer(model)
    norm = layer.input_layernorm
    size = norm.weight.shape[-1]
    layer.enorm, layer.hnorm, layer.shared_head = copy.deepcopy(norm), copy.deepcopy(norm), nn.Module()
    layer.shared_head.norm = copy.deepcopy(norm)
    layer.eh_proj = nn.Linear(2 * size, size, bias=False, device="meta", dtype=norm.weight.dtype)
    layer.eh_proj.to_empty(device=norm.weight.device)
    made: nn.Module = layer
    return made


@torch.no_grad()
def initialise(model: Any, layer: Any) -> None:
    """What a layer starts from that was never trained: the model's last block and last norm, and a projection that adds the
    normed embedding and the normed hidden state. On every rank, where these share parameters out."""
    own = dict(layer.named_parameters()) | dict(layer.named_buffers())
    last: Any = decoder_layers(model)[-1]
    start = {
        name: gather_tensor(tensor)
        for name, tensor in (*last.named_parameters(), *last.named_buffers())
        if name in own and own[name].shape == tensor.shape
    }
    fresh: Any = new_layer(model)
    start["enorm.weight"] = start["hnorm.weight"] = fresh.input_layernorm.weight
    top: Any = backbone(model).norm
    start["shared_head.norm.weight"] = gather_tensor(top.weight)
    start["eh_proj.weight"] = torch.eye(len(own["eh_proj.weight"])).repeat(1, 2)
    for name, tensor in start.items():
        local_shard(own[name]).take(tensor)


def attach(model: nn.Module, path: str | Path) -> Head:
    """Give ``model`` the MTP layer of the checkpoint it was loaded from; CheckpointError when that lacks some of it."""
    layer = make_layer(model)
    prefix = add_layer(model, layer)
    read_layer(model, path, prefix, SHARED)
    return Head(model, layer)


def head_of(model: nn.Module) -> Head:
    """The head that ``attach`` gave to ``model``."""
    layers: Any = backbone(model).layers
    return Head(model, layers[len(decoder_layers(model))])
