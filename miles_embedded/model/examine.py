"""What is wrong with a checkpoint, from its ``config.json`` and the headers of its weights.

The model is built on the meta device and filled by the loader that fills the real one (``load``), with tensors that have shapes
and no numbers. So both say the same sentences, and here they cost a fraction of a second however large the model is.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_core.checkpoint.hf_files import CheckpointFiles
from miles_core.errors import CheckpointError
from miles_embedded.model.configuration import configuration
from miles_embedded.model.dequantize import quantized
from miles_embedded.model.load import FLAG, checkpoint_config, filled, refuse_config, shell, told
from miles_embedded.model.views import views

_WEIGHTS = "*.safetensors*"


class Header:
    """A tensor of a weight file as the loader takes it, like a slice of safetensors that is read when it is indexed: this one gives
    a tensor on the meta device."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __getitem__(self, index: object) -> Header:
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> Tensor:
        """Nowhere, whatever ``device`` is."""
        return torch.empty(self._shape, dtype=dtype, device="meta")


def examine(config: Any, weights: bool) -> None:
    """See ``miles_core.plugin.Plugin.examine``: what would end the run when its model is loaded."""
    options = config.model
    flag, path = ("--ref-load", options.ref_load) if options.ref_load else (FLAG, options.hf_checkpoint)
    if path is not None and Path(path).is_dir():
        files = [(str(f), f.stat().st_mtime_ns) for p in (_WEIGHTS, "*.json") for f in sorted(Path(path).glob(p))]
        _once(path, weights, flag, options.trust_remote_code, tuple(files))


@lru_cache(maxsize=16)  # a notebook, or a suite of tests, starts many runs of one model
def _once(path: str, weights: bool, flag: str, trust_remote_code: bool, files: tuple[object, ...]) -> None:
    examine_checkpoint(path, weights, flag, trust_remote_code)


def examine_checkpoint(
    path: str | Path, weights: bool = True, flag: str = FLAG, trust_remote_code: bool = False
) -> None:
    """Whether ``load_model`` could load it, the numbers in the weights aside.

    Args:
        path, trust_remote_code, flag: as for ``load_model``.
        weights: they must be there.

    Raises:
        CheckpointError: as ``load_model``; or there are no weights.
    """
    there = any(Path(path).glob(_WEIGHTS))
    if weights and not there:
        raise CheckpointError(f"{flag} {path}: it holds no *.safetensors weights; others are not read")
    config = checkpoint_config(path, trust_remote_code, flag)
    with told(path, flag):
        shapes = _shapes(path, config, flag) if there else {}
        model = shell(config, trust_remote_code)
        refuse_config(model)
        if there:
            kind: Any = type(model)
            # weights that are missing would be made at random, on a real device: as many numbers as the model has, at worst
            # name and module are the model's own: conversions of its weights are found by them
            same = {"__module__": kind.__module__, "initialize_weights": lambda self: None}
            empty = type(kind.__name__, (kind,), same)
            state = {name: Header(shape) for name, shape in shapes.items()}
            views(
                filled(empty, None, configuration(model), dtype=torch.bfloat16, state_dict=state)
            )  # or it could not be exported


def _shapes(path: str | Path, config: Any, flag: str) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a checkpoint by the name that it has when nothing is quantised."""
    source = quantized(path, config, flag)
    if source is None:
        return {name: entry.shape for name, entry in CheckpointFiles(path, flag).entries.items()}
    inside = {member for joined in source.joined for group in joined.members for member in group}
    return {n: s for n, s in source.shapes.items() if n not in inside} | {j.name: j.shape for j in source.joined}
