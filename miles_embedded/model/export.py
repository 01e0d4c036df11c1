"""A Hugging Face checkpoint from a model in memory: config, weights in shards, tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from miles_core.checkpoint.directory import is_io
from miles_core.checkpoint.placed import is_occupied, lock_directory, move_into_place, staging_path
from miles_core.data.unit import Unit
from miles_core.errors import CheckpointError
from miles_embedded.model.configuration import configuration
from miles_embedded.model.remote_code import export_code, is_remote
from miles_embedded.model.views import export, unshare

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
        units: the weights to write, under the names and in the order that they come; the model's own by default.
    """
    directory = Path(os.path.realpath(directory))
    work = staging_path(directory, "exporting")
    if is_occupied(directory, work):
        raise CheckpointError(f"{directory} already exists and is not empty; choose another directory for the export")
    lock = -1
    try:
        lock = lock_directory(work)
        for left in work.iterdir():  # by a process that died
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        _write(model, tokenizer, work, shard_bytes, units or export(model))
        move_into_place(work, directory)
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
    if source.is_dir() and source != Path():
        export_code(source, directory, trusted=is_remote(model) or is_remote(tokenizer))
    _write_shards(units, directory, shard_bytes)


def _write_shards(units: Iterator[Unit], directory: Path, shard_bytes: int) -> None:
    """The tensors of a stream as safetensors files, with an index where there are several. How many there are is known at the end
    of the stream only, so files are named then."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    used = total = 0

    def flush() -> None:
        save_file(unshare(pending), directory / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for unit in units:
        for name, tensor in unit.tensors.items():
            if pending and used + tensor.nbytes > shard_bytes:
                flush()
                used = 0
            pending[name] = tensor.detach().to("cpu").contiguous()
            used += tensor.nbytes
            total += tensor.nbytes
    flush()
    count = len(shards)
    names = [
        "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    for number, name in enumerate(names):
        (directory / f"{number}.part").rename(directory / name)
    if count > 1:
        home = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": home}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
