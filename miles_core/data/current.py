"""The column that separates tokens of the trained weights from older ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from miles_core.data.sample import Sample

#: Name of the column. Only runs that train on older tokens have it.
CURRENT = "current"


def current_tokens(samples: Sequence[Sample], version: int) -> Tensor:
    """Return the column, float32 [tokens]: 1 for tokens that the weights ``version`` generated, 0 for prompts and other tokens."""
    parts = [part for s in samples for part in (np.zeros(s.prompt_length, bool), s.versions == version)]
    return torch.from_numpy(np.concatenate([np.zeros(0, bool), *parts]).astype(np.float32))
