"""Rotary embeddings whose frequencies grow with a sequence, over calls that hold several of them.

Transformers takes the frequencies of a whole call from its largest position. A call here packs sequences, or feeds the next tokens
of many, so each row gets its own:

- ``longrope`` (Ding et al. 2024) has two sets and one length at which they change. Up to it a sequence uses the short set; with one
  token more, all of its tokens use the long one. As in Phi-3's own generation, a token is predicted from a sequence of one set
  only: behind that length the engine computes a row's cache anew, and trainer and scores compute such a sequence twice, its
  beginning for the tokens that were generated before. ``Call.spans`` says how long the sequence of a row is.
- ``dynamic`` has other frequencies for every length beyond ``max_position_embeddings``. A key keeps those of the length at which it
  was fed, as in Transformers' generation with a cache, so a row's frequencies are those of its own position.
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
from miles_embedded.model.configuration import text_configuration
from miles_embedded.model.own_forward import put_forward

#: Cosine and sine, or one tensor where a family multiplies complex numbers.
Rotation = Any


def rope_switch(model: nn.Module) -> int:
    """The length of a sequence beyond which it uses other rotary frequencies from its first token on; 0 for no such length."""
    config = text_configuration(model)
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(x for x in given.values() if isinstance(x, dict))):
        if rope.get("rope_type") == "longrope":
            return int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
    return 0


def follow_rows(rotary: nn.Module) -> None:
    """Let a rotary embedding that grows give each row of a ``Call`` its own frequencies; any other stays as it is."""
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
        return _of_positions(rotary, x, position_ids, named)
    if kind == "longrope":
        rope = rotary.config.rope_parameters
        limit = (rope if layer_type is None else rope[layer_type])["original_max_position_embeddings"]
        return _of_spans(plain, position_ids, call.spans > limit, limit)
    return plain(position_ids)


@torch.no_grad()
def _of_positions(rotary: Any, x: Tensor, position_ids: Tensor, named: dict[str, str]) -> Rotation:
    """The family's own rotation, but with one set of frequencies a row: those of the length that ends there."""
    name, original = ("_".join([*named.values(), kind]) for kind in ("inv_freq", "original_inv_freq"))
    kept, lengths = getattr(rotary, name), position_ids[0, :, None] + 1
    grown, _ = ROPE_INIT_FUNCTIONS["dynamic"](rotary.config, x.device, seq_len=lengths, **named)
    frequencies = torch.where(lengths > rotary.original_max_seq_len, grown, getattr(rotary, original).to(x.device))

    def rotated(given: Tensor, positions: Tensor) -> Rotation:
        setattr(rotary, name, given)
        try:
            return inspect.unwrap(type(rotary).forward)(rotary, x, positions, **named)
        finally:
            setattr(rotary, name, kept)

    try:
        return rotated(frequencies, position_ids)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # before Transformers 5.20 families take one set a call, and cannot expand several
        return _set_by_set(rotated, frequencies, position_ids)


def _set_by_set(rotated: Callable[[Tensor, Tensor], Rotation], frequencies: Tensor, position_ids: Tensor) -> Rotation:
    """One call for each set of frequencies, and each row from its own."""
    sets, own = frequencies.unique(dim=0, return_inverse=True)
    rows = [(own == number).nonzero()[:, 0] for number in range(len(sets))]
    back = torch.cat(rows).argsort()
    parts = [rotated(one, position_ids[:, where]) for one, where in zip(sets, rows, strict=True)]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, 1)[:, back]
    return tuple(torch.cat(part, 1)[:, back] for part in zip(*parts, strict=True))


def _of_spans(plain: Callable[[Tensor], Rotation], position_ids: Tensor, grown: np.ndarray, limit: int) -> Rotation:
    """Rotations by the long set where ``grown`` [rows], else by the short one. A call's largest position decides between the two,
    so one is added, or all are kept below."""
    short = None if grown.all() else plain(position_ids.clamp(max=limit - 1))
    if not grown.any():
        return short
    long = plain(torch.cat([position_ids, position_ids.new_full((1, 1), limit)], 1))
    where = torch.from_numpy(grown).to(position_ids.device)[None, :, None]

    def merged(a: Tensor, b: Tensor | None) -> Tensor:
        return a[:, :-1] if b is None else torch.where(where, a[:, :-1], b)

    if isinstance(long, Tensor):
        return merged(long, short)
    return tuple(merged(a, b) for a, b in zip(long, short or (None,) * len(long), strict=True))
