"""Random-number states in a checkpoint, as tensors and JSON through a ``Store``."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping

import numpy as np
import torch

from miles_core.checkpoint.store import Store
from miles_core.errors import CheckpointError

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
