"""The rows of a call as sequences: queries, and the keys and values of each sequence by position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles_core.plugin import ConfigError
from miles_embedded import Call, DecodeCall, PackedCall, PromptCall

#: Key in ``Context.attached`` of a call's places, which all its layers share.
_PLACES = "true_on_policy.places"


@dataclass(frozen=True)
class Sequences:
    """The queries of some sequences, padded, and what they attend to.

    Attributes:
        query: [sequences, queries, heads, dim].
        positions: [sequences, queries] position of each query in its sequence; 0 for padding.
        keys: [sequences, keys, kv heads, dim], where index i is position i. Entries after the last query's position are arbitrary and finite.
        values: [sequences, keys, kv heads, value dim].
        places: [rows] index in the flattened [sequences, queries] of each row of the call.
    """

    query: Tensor
    positions: Tensor
    keys: Tensor
    values: Tensor
    places: Tensor

    @property
    def count(self) -> int:
        """Number of sequences."""
        return self.query.shape[0]

    @property
    def queries(self) -> int:
        """Queries per sequence, padding included."""
        return self.query.shape[1]

    def select(self, part: slice, piece: slice) -> Sequences:
        """Select some sequences, and some of their queries."""
        return replace(
            self,
            query=self.query[part, piece],
            positions=self.positions[part, piece],
            keys=self.keys[part],
            values=self.values[part],
        )


@dataclass(frozen=True)
class Places:
    """Where the rows and keys of a call are; the same for all its layers.

    Attributes:
        rows: [sequences, queries] row of each query; an arbitrary row for padding.
        positions: [sequences, queries] see ``Sequences``.
        places: [rows] see ``Sequences``.
        keys: [sequences, keys] row of each key, for a packed batch and for prompts.
    """

    rows: Tensor
    positions: Tensor
    places: Tensor
    keys: Tensor | None = None


def sequences_of(call: Call, module: Any, query: Tensor, key: Tensor, value: Tensor) -> Sequences:
    """Collect the sequences of a call, and store keys and values if it has a cache.

    Args:
        call: a call of the embedded engine or trainer.
        module: the layer's attention module.
        query: [1, heads, rows, dim].
        key: [1, kv heads, rows, dim].
        value: [1, kv heads, rows, value dim].

    Raises:
        ConfigError: the call is of another kind, or its rows are trees of drafts.
    """
    places = call.ctx.attached.get(_PLACES)
    if places is None:
        places = call.ctx.attached[_PLACES] = _locate(call, query.device)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if isinstance(call, DecodeCall):
        keys, values = (_cached(call, kind, module.layer_idx, x) for kind, x in (("k", key), ("v", value)))
    else:
        if isinstance(call, PromptCall):
            call.store("k", module.layer_idx, call.pad(k).transpose(1, 2))
            call.store("v", module.layer_idx, call.pad(v).transpose(1, 2))
        keys, values = k[places.keys], v[places.keys]
    return Sequences(q[places.rows], places.positions, keys, values, places.places)


def _locate(call: Call, device: torch.device) -> Places:
    if isinstance(call, DecodeCall) and call.rows.parents is None:
        own = np.asarray(call.rows.counts, np.int64)
        before = call.rows.prefix_lengths + call.rows.before
        starts = own.cumsum() - own
        return _places(device, starts, own, before, None)
    if isinstance(call, PromptCall):
        own = np.asarray(call.lengths, np.int64)
        starts = own.cumsum() - own
        return _places(device, starts, own, np.zeros_like(own), (starts, own, np.zeros_like(own), np.zeros_like(own)))
    if isinstance(call, PackedCall):
        trunks, branches = call.packing.trunks, call.packing.branches
        none = np.zeros(len(trunks), np.int64)
        far, length = trunks.start[branches.trunk], trunks.length[branches.trunk]
        starts, own = np.concatenate([trunks.start, branches.start]), np.concatenate([trunks.length, branches.length])
        before, front = np.concatenate([none, length]), np.concatenate([none, far])
        return _places(device, starts, own, before, (starts, own, front, before))
    kind = "a tree of drafts" if isinstance(call, DecodeCall) else type(call).__name__
    raise ConfigError(
        f"--true-on-policy-mode has no attention for {kind}; decode without drafting trees and without CUDA graphs"
    )


def _places(
    device: torch.device,
    starts: np.ndarray,
    own: np.ndarray,
    before: np.ndarray,
    keys: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None,
) -> Places:
    """Compute ``Places``.

    Args:
        device: of the model.
        starts, own: [sequences] first row and number of rows of each sequence.
        before: [sequences] position of its first row.
        keys: [sequences] first row and length of the last part of the keys, then of the part in front; None if keys are in a cache.
    """
    column = np.arange(int(own.max()))
    inside = column < own[:, None]
    rows = np.where(inside, starts[:, None] + column, 0)
    places = np.empty(int(inside.sum()), np.int64)
    places[rows[inside]] = np.flatnonzero(inside)
    of_keys = None
    if keys is not None:
        last, length, front, ahead = (x[:, None] for x in keys)
        at = np.arange(int((length + ahead).max()))
        of_keys = np.where(at < ahead, front + at, last + at - ahead)
        of_keys = np.where(at < length + ahead, of_keys, 0)
    positions = np.where(inside, before[:, None] + column, 0)
    return Places(
        rows=to_device(rows, device),
        positions=to_device(positions, device),
        places=to_device(places, device),
        keys=None if of_keys is None else to_device(of_keys, device),
    )


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy a host array to ``device``; to a GPU through pinned memory, so that the host does not wait for the GPU."""
    found = torch.from_numpy(array)
    return found.to(device) if device.type != "cuda" else found.pin_memory().to(device, non_blocking=True)


def _cached(call: DecodeCall, kind: str, layer: int, fed: Tensor) -> Tensor:
    """Append ``fed`` [1, heads, rows, dim] to the cache; returns the entries of each row's sequence, [rows, keys, heads, dim]."""
    held = call.rows
    own = held.cache.own.slab((kind, layer), fed.shape[1], fed.shape[3:], fed)
    held.write(own, fed[0].transpose(0, 1))
    prompts = held.cache.prefixes.slab((kind, layer), fed.shape[1], fed.shape[3:], fed)
    gathered = call.ctx.attached.get(_PLACES + ".cache")
    if gathered is None:
        total = held.prefix_lengths + held.after
        at = np.arange(int(total.max()))
        ahead = held.prefix_lengths[:, None]
        of_prompt = np.where(at < ahead, at, 0)
        of_own = np.where((at >= ahead) & (at < total[:, None]), at - ahead, 0)
        slots = np.stack([held.cache.prefix_of[held.slots], held.slots])
        gathered = tuple(to_device(x, fed.device) for x in (slots, of_prompt, of_own, at < ahead))
        call.ctx.attached[_PLACES + ".cache"] = gathered
    slots, of_prompt, of_own, near = gathered
    entries = prompts[slots[0][:, None], :, of_prompt]
    return torch.where(near[:, :, None, None], entries, own[slots[1][:, None], :, of_own])
