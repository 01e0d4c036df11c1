"""What a checkpoint holds beside weights and plugins: random-number states and buffered samples.

Both are written as tensors and JSON through a ``Store``, so a checkpoint can be read anywhere and runs no code.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from miles_core.data.sample import Sample
from miles_core.errors import CheckpointError
from miles_core.store import Store

log = logging.getLogger(__name__)


def put_rng(store: Store, name: str = "rng", generators: Mapping[str, torch.Generator] | None = None) -> None:
    """Save the states of Python's, NumPy's and torch's global generators, of every CUDA device's when CUDA is in use,
    and of the named ``generators``."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys, np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    tensors |= {f"generator.{key}": generator.get_state() for key, generator in (generators or {}).items()}
    data = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"kind": kind, "position": position, "has_gauss": has_gauss, "cached_gaussian": cached},
    }
    store.put(name, tensors, data)


def get_rng(store: Store, name: str = "rng", generators: Mapping[str, torch.Generator] | None = None) -> None:
    """Restore what ``put_rng`` saved. Devices that do not correspond are logged: the run goes on, not bit-identically.

    Raises CheckpointError when a generator of ``generators`` was not saved.
    """
    tensors, data = store.get(name)
    random.setstate((data["python"]["version"], tuple(tensors["python"].tolist()), data["python"]["gauss"]))
    legacy = data["numpy"]
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state((legacy["kind"], keys, legacy["position"], legacy["has_gauss"], legacy["cached_gaussian"]))
    torch.set_rng_state(tensors["torch"])
    saved = [key for key in tensors if key.startswith("cuda.")]
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if saved and len(saved) != here:
        log.warning(
            "the checkpoint has random-number states of %d CUDA devices and this machine has %d: the run continues, "
            "but not with the numbers it would have drawn",
            len(saved),
            here,
        )
    for index in range(min(len(saved), here)):
        torch.cuda.set_rng_state(tensors[f"cuda.{index}"], index)
    for key, generator in (generators or {}).items():
        if f"generator.{key}" not in tensors:
            raise CheckpointError(f"the checkpoint's entry {name!r} has no state of the random generator {key!r}")
        generator.set_state(tensors[f"generator.{key}"])


def put_samples(store: Store, name: str, samples: Sequence[Sample]) -> None:
    """Save samples with all their recorded fields (arrays, lists of arrays, numbers).

    Raises CheckpointError naming the sample and the entry that neither JSON nor a tensor can hold.
    """
    tensors: dict[str, torch.Tensor] = {}
    rows = []
    for position, sample in enumerate(samples):
        row = sample.to_dict()
        row["fields"] = {key: _pack(value, f"{position}.{key}", tensors) for key, value in row["fields"].items()}
        for key, value in row.items():
            if key != "fields":
                row[key] = _plain(value, f"sample {sample.index}: {key}")
        rows.append(row)
    store.put(name, tensors, rows)


def get_samples(store: Store, name: str) -> list[Sample]:
    """The samples ``put_samples`` saved, equal to them (arrays with their dtypes)."""
    tensors, rows = store.get(name)
    samples = []
    for position, row in enumerate(rows):
        fields = {key: _unpack(packed, f"{position}.{key}", tensors) for key, packed in row["fields"].items()}
        samples.append(Sample.from_dict({**row, "fields": fields}))
    return samples


def _pack(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Put a field's arrays into ``tensors``; returns how to rebuild it."""
    if isinstance(value, torch.Tensor):
        tensors[key] = value
        return {"kind": "tensor"}
    if isinstance(value, np.ndarray):
        tensors[key] = _tensor(value, key)
        return {"kind": "array"}
    if isinstance(value, list) and value and all(isinstance(row, np.ndarray) for row in value):
        tensors[key] = _tensor(np.concatenate(value), key)
        return {"kind": "ragged", "lengths": [len(row) for row in value]}
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
    """``value`` as JSON data, NumPy's and torch's scalars unwrapped."""
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
