"""Rotary embeddings whose frequencies depend on the sequence length, for calls with several sequences.

Transformers derives the frequencies of a whole call from its largest position. Here a call packs sequences, or feeds the next tokens
of many, so the frequencies are selected per row:

- ``longrope`` (Ding et al. 2024) has two sets of frequencies and a length at which they change. Sequences up to that length use the
  short set; all tokens of a longer sequence use the long set. As in Phi-3's own generation, each token is predicted from a sequence
  with one set only: beyond that length the engine recomputes a row's cache, and trainer and scores compute such a sequence twice,
  its beginning separately for the tokens generated before the change. ``Call.spans`` is the relevant sequence length of each row.
- ``dynamic`` has different frequencies for every length beyond ``max_position_embeddings``. A key keeps the frequencies of the length
  at which it was fed, as in Transformers' generation with a cache, so a row uses the frequencies of its own position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles_embedded.model.call import active_call
from miles_embedded.model.parts import put_forward, text_configuration

#: Cosine and sine; one tensor in families that multiply complex numbers.
Rotation = Any


def rope_switch(model: nn.Module) -> int:
    """Return the sequence length beyond which all tokens of a sequence use other rotary frequencies; 0 if there is none."""
    config = text_configuration(model)
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(x for x in given.values() if isinstance(x, dict))):
        if rope.get("rope_type") == "longrope":
            return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return 0


def follow_rows(rotary: nn.Module) -> None:
    """Make a length-dependent rotary embedding select frequencies per row of a ``Call``; leave others unchanged."""
    module: Any = rotary
    kinds = getattr(module, "rope_type", None)
    found = {kinds} if isinstance(kinds, str) else set(kinds.values()) if isinstance(kinds, dict) else set()
    if found & {"longrope", "dynamic"}:
        put_forward(module, _forward)


def _forward(rotary: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Rotation:
    named = {} if layer_type is None else {"layer_type": layer_type}
    kind = rotary.rope_type if layer_type is None else rotary.rope_type[layer_type]
    call = active_call()

    def plain(positions: Tensor) -> Rotation:
        return type(rotary).forward(rotary, x, positions, **named)

    if call is None:
        return plain(position_ids)
    if kind == "dynamic":
        return _rotate_by_position(rotary, x, position_ids, named)
    if kind == "longrope":
        rope = rotary.config.rope_parameters
        limit = (rope if layer_type is None else rope[layer_type])["original_max_position_embeddings"]
        return _rotate_by_span(plain, position_ids, call.spans > limit, limit)
    return plain(position_ids)


@torch.no_grad()
def _rotate_by_position(rotary: Any, x: Tensor, position_ids: Tensor, named: dict[str, str]) -> Rotation:
    """Run the family's rotation with frequencies per row: those of the sequence length that ends at the row's position."""
    name, original = ("_".join([*named.values(), kind]) for kind in ("inv_freq", "original_inv_freq"))
    kept, lengths = getattr(rotary, name), position_ids[0, :, None] + 1
    grown, _ = ROPE_INIT_FUNCTIONS["dynamic"](rotary.config, x.device, seq_len=lengths, **named)
    frequencies = torch.where(lengths > rotary.original_max_seq_len, grown, getattr(rotary, original).to(x.device))

    def rotate(given: Tensor, positions: Tensor) -> Rotation:
        setattr(rotary, name, given)
        try:
            return inspect.unwrap(type(rotary).forward)(rotary, x, positions, **named)
        finally:
            setattr(rotary, name, kept)

    try:
        return rotate(frequencies, position_ids)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # before Transformers 5.20 families accept one set of frequencies per call
        return _rotate_per_set(rotate, frequencies, position_ids)


def _rotate_per_set(
    rotate: Callable[[Tensor, Tensor], Rotation], frequencies: Tensor, position_ids: Tensor
) -> Rotation:
    """Rotate with each distinct set of frequencies, and select each row from its own set."""
    sets, own = frequencies.unique(dim=0, return_inverse=True)
    rows = [(own == number).nonzero()[:, 0] for number in range(len(sets))]
    back = torch.cat(rows).argsort()
    parts = [rotate(one, position_ids[:, where]) for one, where in zip(sets, rows, strict=True)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, 1)[:, back]
    return tuple(torch.cat(part, 1)[:, back] for part in zip(*parts, strict=True))


def _rotate_by_span(
    plain: Callable[[Tensor], Rotation], position_ids: Tensor, grown: np.ndarray, limit: int
) -> Rotation:
    """Rotate with the long set where ``grown`` [rows] is True, else with the short one.

    The largest position of a call selects the set: append a position above the limit for the long set, or clamp all positions for the
    short one.
    """
    short = None if grown.all() else plain(position_ids.clamp(max=limit - 1))
    if not grown.any():
        return short
    long = plain(torch.cat([position_ids, position_ids.new_full((1, 1), limit)], 1))
    where = torch.from_numpy(grown).to(position_ids.device)[None, :, None]

    def merge(a: Tensor, b: Tensor | None) -> Tensor:
        return a[:, :-1] if b is None else torch.where(where, a[:, :-1], b)

    if isinstance(long, Tensor):
        return merge(long, short)
    return tuple(merge(a, b) for a, b in zip(long, short or (None,) * len(long), strict=True))
