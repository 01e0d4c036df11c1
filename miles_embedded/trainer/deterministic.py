"""A trainer with deterministic results, also on a GPU (``--embedded-deterministic``). Some GPU operations sum in the order in which blocks
of threads finish: the query gradients of flash attention, ``index_add``, the gradient
of ``gather`` and ``index_select``. PyTorch has slower variants with a fixed order. Its mode for deterministic algorithms selects them, and
raises an error if an operation has none. The mode is global to the process, so it is enabled only while the trainer computes: an engine in
the same process uses cumulative sums, which the mode refuses although their order along the rows of a matrix is fixed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from miles_core.contracts.trainer import LossFunction, Pass
from miles_core.data.batch import Batch
from miles_embedded.trainer.trainer import EmbeddedTrainer

#: cuBLAS adds in a fixed order with such a workspace only; PyTorch's mode checks the variable before each product.
WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Use PyTorch's deterministic algorithms inside this context.

    Raises:
        RuntimeError: from an operation that has no deterministic algorithm.
    """
    os.environ.setdefault(*WORKSPACE)
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("error")
    settings.fill_uninitialized_memory = False  # it would write NaN to every new tensor
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        settings.fill_uninitialized_memory = before[1]


class DeterministicTrainer(EmbeddedTrainer):
    """An ``EmbeddedTrainer`` that computes with deterministic algorithms."""

    def columns(self, batch: Batch, kind: Pass, wanted: Collection[str], top_k: int = 0) -> dict[str, Tensor]:
        """See ``Trainer.columns``."""
        with deterministic_algorithms():
            return super().columns(batch, kind, wanted, top_k)

    def step(
        self, batch: Batch, loss: LossFunction | None = None, lr: float | None = None
    ) -> dict[str, tuple[float, float]]:
        """See ``Trainer.step``."""
        with deterministic_algorithms():
            return super().step(batch, loss, lr)

    def accumulate_gradients(self, batch: Batch, loss: LossFunction | None = None) -> dict[str, tuple[float, float]]:
        """See ``Trainer.accumulate_gradients``."""
        with deterministic_algorithms():
            return super().accumulate_gradients(batch, loss)

    def apply_gradients(self, lr: float | None = None) -> dict[str, tuple[float, float]]:
        """See ``Trainer.apply_gradients``."""
        with deterministic_algorithms():
            return super().apply_gradients(lr)
