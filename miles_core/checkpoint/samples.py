"""Save and restore buffered samples with all their recorded fields.

Samples are stored as tensors and JSON through a ``Store``, so reading a checkpoint executes no code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from miles_core.checkpoint.store import Store
from miles_core.data.media import Media
from miles_core.data.sample import COLUMNS, Sample
from miles_core.errors import CheckpointError


def put_samples(store: Store, name: str, samples: Sequence[Sample]) -> None:
    """Save samples with all their recorded fields (arrays, lists of arrays, numbers).

    Raises:
        CheckpointError: a value fits neither JSON nor a tensor; names the sample and the entry.
    """
    tensors: dict[str, torch.Tensor] = {}
    for key in COLUMNS:  # one tensor for all samples, because JSON needs many times the bytes and the time
        columns = [column for sample in samples if (column := getattr(sample, key)) is not None]
        if columns:
            tensors[f"columns.{key}"] = _tensor(np.concatenate(columns), key)
    rows = bytearray()
    for position, sample in enumerate(samples):
        row = {each.name: getattr(sample, each.name) for each in dataclasses.fields(sample)}
        row |= {key: None if row[key] is None else len(row[key]) for key in COLUMNS}
        row["media"] = [_pack_media(media, tensors) for media in sample.media]
        row["fields"] = {key: _pack(value, f"{position}.{key}", tensors) for key, value in row["fields"].items()}
        for key, value in row.items():
            if key != "fields":
                row[key] = _plain(value, f"sample {sample.index}: {key}")
        rows += json.dumps(row).encode() + b"\n"
    tensors["rows"] = torch.from_numpy(np.frombuffer(rows, np.uint8))
    store.put(name, tensors)


def get_samples(store: Store, name: str) -> list[Sample]:
    """Return the samples that ``put_samples`` saved, with the same dtypes."""
    tensors, rows = store.get(name)
    if rows is None:  # a line for each sample: other threads wait for each call of ``json.loads``
        rows = [json.loads(line) for line in tensors["rows"].numpy().tobytes().splitlines()]
    samples, starts = [], dict.fromkeys(COLUMNS, 0)
    known: dict[str, Media] = {}
    for position, row in enumerate(rows):
        for key in COLUMNS:
            if isinstance(row[key], int):  # checkpoints of earlier versions hold the numbers
                start, starts[key] = starts[key], starts[key] + row[key]
                row[key] = tensors[f"columns.{key}"][start : starts[key]].numpy()
        fields = {key: _unpack(packed, f"{position}.{key}", tensors) for key, packed in row["fields"].items()}
        media = tuple(_unpack_media(packed, tensors, known) for packed in row.get("media", ()))
        samples.append(Sample.from_dict({**row, "fields": fields, "media": media}))
    return samples


def _pack_media(media: Media, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Add the content of media that are not in a file to ``tensors``, once for all samples; returns the rest as JSON."""
    if isinstance(media.source, bytes):
        tensors[f"media.{media.digest}"] = torch.from_numpy(np.frombuffer(media.source, np.uint8).copy())
        return {"kind": media.kind, "digest": media.digest}
    return media.to_json()


def _unpack_media(packed: Mapping[str, str], tensors: Mapping[str, torch.Tensor], known: dict[str, Media]) -> Media:
    """Inverse of ``_pack_media``; samples with the same media share the object in ``known``."""
    digest = packed["digest"]
    if digest not in known:
        content = tensors.get(f"media.{digest}")
        known[digest] = (
            Media.from_json(packed) if content is None else Media(packed["kind"], digest, content.numpy().tobytes())
        )
    return known[digest]


def _pack(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Add the arrays of a field to ``tensors``; returns the JSON record from which ``_unpack`` rebuilds the field."""
    if isinstance(value, torch.Tensor):
        tensors[key] = value
        return {"kind": "tensor"}
    if isinstance(value, np.ndarray):
        tensors[key] = _tensor(value, key)
        return {"kind": "array"}
    if isinstance(value, list) and value and all(isinstance(row, np.ndarray) for row in value):
        tensors[key] = _tensor(np.concatenate(value), key)
        return {"kind": "ragged", "lengths": [len(row) for row in value]}
    if hasattr(value, "__array__"):  # a reference to an array in other memory
        return _pack(np.asarray(value), key, tensors)
    return {"kind": "plain", "value": _plain(value, f"field {key}")}


def _unpack(packed: Mapping[str, Any], key: str, tensors: Mapping[str, torch.Tensor]) -> Any:
    if packed["kind"] == "plain":
        return packed["value"]
    if packed["kind"] == "tensor":
        return tensors[key]
    array = tensors[key].numpy()
    if packed["kind"] == "array":
        return array
    return np.split(array, np.cumsum(packed["lengths"])[:-1])


def _tensor(array: np.ndarray, key: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))
    except TypeError as error:
        raise CheckpointError(f"sample field {key}: an array of {array.dtype} cannot be saved; use numbers") from error


def _plain(value: Any, where: str) -> Any:
    """Convert ``value`` to JSON data; NumPy and torch scalars become Python numbers."""
    if value is None or isinstance(value, str | bool | int | float):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise CheckpointError(
        f"{where} holds a {type(value).__name__}, which a checkpoint cannot save; "
        "keep plain numbers, text, lists and dicts with text keys there, and arrays in declared fields"
    )
