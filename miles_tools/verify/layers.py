"""Compares the outputs of every module of engine and trainer bit by bit, and finds the first module that differs.

The two sides compute a token's row in calls of different shapes: the engine in a prefill or decode step, the trainer in a packed
micro-batch. The comparison does not need to know which call computed a row. Every row that the trainer computes for the samples of an
engine is also a row that the
engine computed, so a module is bit-identical if each output row of the trainer is among those of the engine. The first module, in the order
of computation, that is not bit-identical has equal inputs and different outputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from miles_core.errors import ConfigError
from miles_core.mismatch.budget import in_this_process

if TYPE_CHECKING:
    from miles_core.contracts.runtime import PolicyParts

#: Bytes of the digest of a row, and hexadecimal digits of the digest of a module's outputs.
_ROW, _SHOWN = 16, 16


@dataclass(frozen=True)
class ModuleOutputs:
    """The output rows of one module.

    Attributes:
        name: name of the module, the same on both sides.
        rows: distinct rows of the trainer.
        differing: how many of them the engine did not compute.
        engine, trainer: digests of those rows on either side; equal if ``differing`` is 0.
    """

    name: str
    rows: int
    differing: int
    engine: str
    trainer: str


@dataclass(frozen=True)
class LayerComparison:
    """The modules that both sides ran, in the order in which the trainer finished them."""

    modules: tuple[ModuleOutputs, ...]

    @property
    def first(self) -> ModuleOutputs | None:
        """The first module whose outputs differ; None if none does."""
        return next((module for module in self.modules if module.differing), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"first": self.first and self.first.name, "modules": [asdict(module) for module in self.modules]}


Rows = dict[str, set[bytes]]


@contextmanager
def record_rows(model: Any) -> Iterator[Rows]:
    """Collect the digests of every module's output rows while the context is open.

    Args:
        model: a ``torch.nn.Module``; None collects nothing.

    Yields:
        module name -> digests, in the order in which the modules finished their first call.
    """
    found: Rows = {}
    modules = [] if model is None else [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_hook(partial(_record, found, name)) for name, module in modules]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def compare_rows(engine: Rows, trainer: Rows) -> LayerComparison:
    """Compare the rows of the modules that both sides ran."""
    return LayerComparison(
        tuple(
            ModuleOutputs(name, len(rows), len(rows - engine[name]), _digest(rows & engine[name]), _digest(rows))
            for name, rows in trainer.items()
            if name in engine
        )
    )


def find_models(parts: PolicyParts) -> tuple[Any, Any]:
    """Return the models of engine and trainer. ConfigError if one of them is in another process or has no such model."""
    rank = getattr(parts.learner, "rank", None)
    chunks: Any = getattr(getattr(rank, "trainer", None), "chunks", ())
    if not in_this_process(parts.serving) or len(chunks) != 1:
        raise ConfigError(
            "--exact reads the outputs of both models and needs them in this process: give --engine embedded --trainer embedded "
            "--runtime inline"
        )
    engine: Any = parts.serving
    if getattr(getattr(engine, "ahead", None), "used", False):
        raise ConfigError(
            "--exact sees no module while CUDA graphs replay the decode steps: give --embedded-disable-cuda-graph"
        )
    return engine.model, chunks[0]


def _record(found: Rows, name: str, module: Any, args: Any, output: Any) -> None:
    from torch import Tensor

    outputs = output if isinstance(output, (tuple, list)) else [output]
    tensors = [x for x in outputs if isinstance(x, Tensor) and x.dim() > 1 and x.numel()]
    for tensor in tensors:
        found.setdefault(name, set()).update(_digest_rows(tensor))


def _digest_rows(tensor: Any) -> Iterator[bytes]:
    """Yield the digest of each row of tensor [..., width]."""
    import torch

    flat = tensor.detach().reshape(-1, tensor.shape[-1]).cpu().contiguous()
    for row in flat.view(torch.uint8).numpy():
        yield hashlib.blake2b(row.tobytes(), digest_size=_ROW).digest()


def _digest(rows: set[bytes]) -> str:
    return hashlib.blake2b(b"".join(sorted(rows))).hexdigest()[:_SHOWN]
