"""Check a checkpoint from its ``config.json`` and the headers of its weights.

The model is built on the meta device and filled by the same loader as a real one (``load``), with tensors that have shapes but no
data. Errors are therefore the same, and the check takes a fraction of a second for any model size.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.errors import CheckpointError
from miles_embedded.model.dequantize import open_files
from miles_embedded.model.load import (
    FLAG,
    build_empty,
    checkpoint_config,
    facts_of,
    fill_model,
    load_errors,
)
from miles_embedded.model.parts import configuration
from miles_embedded.model.refusals import refuse_config, refuse_longer
from miles_embedded.model.shapes import check_forward
from miles_embedded.model.views import views

_WEIGHTS = "*.safetensors*"


class Header:
    """Stand-in for a lazily read safetensors slice: indexing and ``to`` return a tensor on the meta device."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __getitem__(self, index: object) -> Header:
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a meta tensor of this shape; ``device`` is ignored."""
        return torch.empty(self._shape, dtype=dtype, device="meta")


def examine(config: Any, weights: bool) -> None:
    """See ``miles_core.plugin.Plugin.examine``: raise the errors that loading the run's model would raise."""
    options = config.model
    flag, path = ("--ref-load", options.ref_load) if options.ref_load else (FLAG, options.hf_checkpoint)
    if path is not None and Path(path).is_dir():
        files = [(str(f), f.stat().st_mtime_ns) for p in (_WEIGHTS, "*.json") for f in sorted(Path(path).glob(p))]
        _once(path, weights, flag, options.trust_remote_code, config.rollout.max_context_len or 0, tuple(files))


@lru_cache(maxsize=16)  # notebooks and test suites start many runs of the same model
def _once(
    path: str, weights: bool, flag: str, trust_remote_code: bool, longest: int, files: tuple[object, ...]
) -> None:
    examine_checkpoint(path, weights, flag, trust_remote_code, longest)


def examine_checkpoint(
    path: str | Path,
    weights: bool = True,
    flag: str = FLAG,
    trust_remote_code: bool = False,
    longest: int | None = None,
) -> None:
    """Check that ``load_model`` could load the checkpoint, without checking the values of the weights.

    Args:
        path, trust_remote_code, flag: as for ``load_model``.
        weights: require weights.
        longest: length of the run's sequences, 0 for that of ``config.json``; None to accept any.

    Raises:
        CheckpointError: as ``load_model``; or weights are required and missing.
    """
    there = any(Path(path).glob(_WEIGHTS))
    if weights and not there:
        raise CheckpointError(f"{flag} {path}: it has no *.safetensors weights; other formats are not supported")
    config = checkpoint_config(path, trust_remote_code, flag)
    with load_errors(path, flag):
        shapes = _shapes(path, config, flag) if there else {}
        model = build_empty(config, trust_remote_code)
        refuse_config(model)
        if there:
            kind: Any = type(model)
            # Initialising missing weights would allocate up to the whole model on a real device.
            # Keep the class name and module: Transformers looks up weight conversions by them.
            same = {"__module__": kind.__module__, "initialize_weights": lambda self: None}
            empty = type(kind.__name__, (kind,), same)
            state = {name: Header(shape) for name, shape in shapes.items()}
            # Deriving the views checks that the model could be exported.
            views(fill_model(empty, None, configuration(model), dtype=torch.bfloat16, state_dict=state))
        check_forward(model)
        if longest is not None:
            origin = "--rollout-max-context-len" if longest else "config.json"
            refuse_longer(model, longest or facts_of(model)["model.context"] or 0, origin)


def _shapes(path: str | Path, config: Any, flag: str) -> dict[str, tuple[int, ...]]:
    """Return checkpoint name -> shape of the unquantised tensors."""
    source = open_files(path, config, flag)
    if source is None:
        return {name: entry.shape for name, entry in CheckpointFiles(path, flag).entries.items()}
    inside = {member for joined in source.joined for group in joined.members for member in group}
    return {n: s for n, s in source.shapes.items() if n not in inside} | {j.name: j.shape for j in source.joined}
