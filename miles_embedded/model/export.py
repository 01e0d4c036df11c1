"""A Hugging Face checkpoint from a model in memory: config, weights in shards, tokenizer."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from miles_core.checkpoint.directory import is_io
from miles_core.checkpoint.placed import gathering, locked, place, taken
from miles_core.data.unit import Unit
from miles_core.errors import CheckpointError
from miles_embedded.model.configuration import configuration
from miles_embedded.model.views import export, sources, together, views

#: Bytes of one weight file.
SHARD_BYTES = 5 * 10**9
#: Files of a checkpoint that say how images, video and sound become its inputs.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def export_checkpoint(
    model: nn.Module,
    tokenizer: Any,
    directory: Path | str,
    shard_bytes: int = SHARD_BYTES,
    units: Iterator[Unit] | None = None,
) -> None:
    """Write ``directory``; it appears complete or not at all.

    Args:
        model: the model copy; its tensors are written in the dtype they have.
        tokenizer: a Transformers tokenizer, or None to leave it out.
        directory: must not exist, or be empty; CheckpointError otherwise, and when the disk refuses.
        shard_bytes: a weight file is closed before it grows beyond this.
        units: ``views.export`` of the model, where the caller has begun it.
    """
    directory = Path(os.path.realpath(directory))
    work = gathering(directory, "exporting")
    if taken(directory, work):
        raise CheckpointError(f"{directory} already exists and is not empty; choose another directory for the export")
    lock = -1
    try:
        lock = locked(work)
        for left in work.iterdir():  # by a process that died
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        _write(model, tokenizer, work, shard_bytes, units or export(model))
        place(work, directory)
    except BlockingIOError as error:
        raise CheckpointError(f"another process is exporting to {directory}; choose another directory") from error
    except Exception as error:
        if not is_io(error):
            raise
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{directory} cannot be written ({why}); free space there, or choose another directory for the export"
        ) from error
    finally:
        if lock >= 0:
            shutil.rmtree(work, ignore_errors=True)
            os.close(lock)


def _write(model: nn.Module, tokenizer: Any, directory: Path, shard_bytes: int, units: Iterator[Unit]) -> None:
    configuration(model).save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    source = Path(getattr(configuration(model), "_name_or_path", ""))
    for name in PROCESSORS:  # of the towers, which are as they were
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    shards = _plan(model, shard_bytes)
    names = [
        "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        for i in range(len(shards))
    ]
    home = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    pending: dict[str, Tensor] = {}
    size = 0
    for unit in units:
        for name, tensor in unit.tensors.items():
            pending[name] = tensor.detach().to("cpu").contiguous()
            size += tensor.nbytes
            if len(pending) == len(shards[names.index(home[name])]):
                save_file(pending, directory / home[name], metadata={"format": "pt"})
                pending = {}
    if len(shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": home}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _plan(model: nn.Module, shard_bytes: int) -> list[list[str]]:
    """Tensor names of each shard, in stream order."""
    shards: list[list[str]] = [[]]
    used, state = 0, sources(model)
    for view in (v for members in together(views(model)) for v in members):
        nbytes = math.prod(view.size) * state[view.source].element_size()
        if shards[-1] and used + nbytes > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(view.name)
        used += nbytes
    return shards
