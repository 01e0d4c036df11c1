"""Writes weight updates to a directory for SGLang to read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from miles_core.data import Encoded
from miles_formats.convert import Layout

_SHARD_BYTES = 2 << 30


@contextmanager
def write_update(
    units: Iterable[Encoded], parent: Path, version: int, described: Layout | None = None
) -> Iterator[Path]:
    """Write an update as safetensors files with an index and yield the directory.

    The context manager removes the directory at exit, because every version is as large as the model.

    Args:
        units: the encoded weights.
        parent: where to create the directory.
        version: version of the weights, used in the directory name.
        described: the checkpoint's other files; if given, the directory is a complete checkpoint.
    """
    directory = parent / f"version_{version}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        if described is not None:
            described.write(directory)
        _write(units, directory)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write(units: Iterable[Encoded], directory: Path) -> None:
    index: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal shard, size
        if shard:
            file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
            save_file(shard, directory / file, metadata={"format": "pt"})
            index.update(dict.fromkeys(shard, file))
        shard, size = {}, 0

    for unit in units:
        shard |= {name: tensor.detach().cpu().contiguous().clone() for name, tensor in unit.parts.items()}
        size += unit.nbytes
        if size > _SHARD_BYTES:
            flush()
    flush()
    content = {"metadata": {}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")
