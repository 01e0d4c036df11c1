"""Packed calls, heads and options for the tests of attention."""

from types import SimpleNamespace

import numpy as np
import torch

from miles_core.contracts.trainer import Context
from miles_embedded import AttentionOptions, PackedCall
from miles_embedded.trainer.packing import Packing, Segments


def packed(lengths, trunk, device="cpu"):
    """A call with one trunk and branches of ``lengths`` tokens."""
    starts = np.cumsum([trunk, *lengths[:-1]])
    trunks = Segments(np.array([0]), np.array([trunk]), np.array([-1]))
    branches = Segments(starts, np.array(lengths), np.zeros(len(lengths), np.int64))
    rows = torch.arange(trunk + sum(lengths), device=device)
    positions = torch.cat([torch.arange(trunk), *(trunk + torch.arange(n) for n in lengths)]).to(device)
    packing = Packing(rows, positions, rows, trunks, branches, rows[:0], rows[:0])
    return PackedCall(Context("train", (0,), rows), packing)


MODULE = SimpleNamespace(layer_idx=0)
OPTIONS = {
    "plain": None,
    "window": AttentionOptions(window=5),
    "chunk": AttentionOptions(chunk=8),
    "cap": AttentionOptions(cap=3.0),
    "sinks": AttentionOptions(sinks=torch.tensor([0.3, -1.0, 2.0, 0.1])),
}


def heads(rows, generator, dtype=torch.float32):
    return [torch.randn(1, n, rows, 16, generator=generator).to(dtype) for n in (4, 2, 2)]
