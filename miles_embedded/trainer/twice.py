"""Samples that outgrow their rotary frequencies (``model.growing_rope``), laid out once for each set of them.

The tokens up to the switch were predicted with the short set, those behind it with the long one, from the first token on. So such
a sample is two of them: its beginning, trained up to the switch, and the whole of it, trained behind. They share no row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from miles_core.data.batch import Batch
from miles_embedded.trainer.packing import Packing, needed_rows, pack


def pack_grown(batch: Batch, share: bool, switch: int) -> Packing:
    """``pack``, for a model whose frequencies change behind ``switch`` tokens; 0 for one whose do not."""
    grown = np.flatnonzero(needed_rows(batch) > switch) if switch else np.zeros(0, np.int64)
    if not len(grown):
        return pack(batch, share)
    tokens, device = len(batch.tokens), batch.tokens.device
    twice = batch.select([*range(len(batch)), *grown.tolist()])
    origin = torch.cat([torch.arange(tokens, device=device), _places(batch, grown)])
    second = torch.arange(len(twice.tokens), device=device) >= tokens
    within = torch.arange(len(twice.tokens), device=device) - twice.starts[twice.owner]
    beginning = torch.zeros(len(twice), dtype=torch.bool, device=device)
    beginning[torch.from_numpy(grown).to(device)] = True
    outside = torch.where(second, within <= switch, beginning[twice.owner] & (within > switch))
    group = twice.group.clone()
    group[len(batch) :] += int(batch.group.max()) + 1
    mask = twice.mask.masked_fill(outside, 0)
    packing = pack(replace(twice, group=group, columns=twice.columns | {"loss_mask": mask}), share)
    targets = origin[packing.targets]
    order = targets.argsort()
    # a token that both compute is counted where its sample is whole
    row_of = packing.row_of[:tokens].clone()
    again = packing.row_of[tokens:]
    row_of[origin[tokens:][again >= 0]] = again[again >= 0]
    return replace(
        packing,
        rows=origin[packing.rows],
        row_of=row_of,
        sources=packing.sources[order],
        targets=targets[order],
        spans=np.where((packing.rows >= tokens).cpu().numpy(), switch + 1, switch),
    )


def _places(batch: Batch, samples: np.ndarray) -> Tensor:
    """Flat indices of these samples' tokens."""
    return torch.cat(
        [
            torch.arange(int(n), device=s.device) + s
            for s, n in zip(batch.starts[samples], batch.lengths[samples], strict=True)
        ]
    )
