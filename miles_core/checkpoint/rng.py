"""Save and restore random-number states in a checkpoint, as tensors and JSON through a ``Store``."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch

from miles_core.checkpoint.store import Store

log = logging.getLogger(__name__)

_NAME = "rng"


RngState = tuple[dict[str, torch.Tensor], dict[str, Any]]


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, which custom rewards and plugins may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> RngState:
    """Return the states of the global generators of Python, NumPy and torch, and of all CUDA devices if CUDA is initialised."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys, np.int64)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        tensors |= {f"cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    data = {
        "python": {"version": version, "gauss": gauss},
        "numpy": {"kind": kind, "position": position, "has_gauss": has_gauss, "cached_gaussian": cached},
    }
    return tensors, data


def put_rng(store: Store, state: RngState | None = None, *, sharded: bool = False) -> None:
    """Save ``state``, by default the current ``rng_state()``. With ``sharded``, every rank saves its own state."""
    tensors, data = state or rng_state()
    store.put(_NAME, tensors, data, sharded=sharded)


def get_rng(store: Store) -> None:
    """Restore the state that ``put_rng`` saved.

    If the number of CUDA devices differs, logs a warning and restores the states of the common devices; the run then continues,
    but not bit-identically.
    """
    tensors, data = store.get(_NAME)
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
