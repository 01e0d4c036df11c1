"""Layout of samples that exceed the length at which rotary frequencies change (``model.growing_rope``), once per set of frequencies.

Tokens up to the switch were predicted with the short set; later ones with the long set for the whole sequence. Such a sample is therefore
packed twice: its beginning, trained up to the switch, and the whole sample, trained after it. The two copies share no row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from miles_core.data.batch import Batch
from miles_embedded.trainer.packing import Packing, needed_rows, pack


def pack_grown(batch: Batch, share: bool, switch: int) -> Packing:
    """Pack a batch like ``pack`` for a model whose frequencies change after ``switch`` tokens; 0 if they do not change."""
    grown = np.flatnonzero(needed_rows(batch) > switch) if switch else np.zeros(0, np.int64)
    if not len(grown):
        return pack(batch, share)
    tokens, device = len(batch.tokens), batch.tokens.device
    twice = batch.select([*range(len(batch)), *grown.tolist()])
    origin = torch.cat([torch.arange(tokens, device=device), _find_tokens(batch, grown)])
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
    # a token in both copies refers to the copy of the whole sample
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


def _find_tokens(batch: Batch, samples: np.ndarray) -> Tensor:
    """Return the flat indices of these samples' tokens."""
    return torch.cat(
        [
            torch.arange(int(n), device=s.device) + s
            for s, n in zip(batch.starts[samples], batch.lengths[samples], strict=True)
        ]
    )
