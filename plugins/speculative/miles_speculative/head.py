"""A multi-token-prediction (MTP) layer in the layout of DeepSeek-V3 (arXiv 2412.19437, section 2.2).

It predicts the next token from a token's embedding and the previous token's hidden state: both are normalised, concatenated and projected,
one decoder block follows, and the model's output layer computes the logits. The entry at position t combines token t with the hidden state
of t - 1, so that its keys and values have the same cache position as the model's. The first token has a zero hidden state, in training too.
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

#: Copies of the model's embedding and output layer in some checkpoints; ignored, because the MTP layer shares the model's.
SHARED = ("embed_tokens.weight", "shared_head.head.weight")


class Head(Draft):
    """A model's MTP layer; ``module`` is the decoder block with ``enorm``, ``hnorm``, ``eh_proj`` and ``shared_head.norm``."""

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, call: Any) -> Tensor:
        """See ``Draft``; returns the output of the layer's last norm."""
        layer = self.module
        embedded = self.policy.get_input_embeddings()(tokens).detach()
        joined = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], -1))
        out: Tensor = layer.shared_head.norm(run_layer(self.policy, layer, joined, positions, call))
        return out


def make_layer(model: nn.Module) -> nn.Module:
    """Create an uninitialised MTP layer for ``model`` without attaching it: a block like the model's last one, and the four parts."""
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
    """Initialise an MTP layer from the model's last block and last norm, with a projection that adds embedding and hidden state.

    With sharded parameters, a collective of all ranks."""
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
    """Attach the MTP layer of the checkpoint ``path`` to ``model``. Raises CheckpointError if tensors are missing."""
    layer = make_layer(model)
    prefix = add_layer(model, layer)
    read_layer(model, path, prefix, SHARED)
    return Head(model, layer)


def head_of(model: nn.Module) -> Head:
    """Return the head that ``attach`` attached to ``model``."""
    layers: Any = backbone(model).layers
    return Head(model, layers[len(decoder_layers(model))])
