"""Export a model to a Hugging Face checkpoint: configuration, sharded weights, tokenizer."""

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
from miles_core.checkpoint.placed import is_occupied, staging_path
from miles_core.data.weight_unit import WeightUnit
from miles_core.errors import CheckpointError
from miles_embedded.model.parts import configuration
from miles_embedded.model.remote_code import export_code, is_remote
from miles_embedded.model.views import export, unshare
from miles_formats.convert.placement import lock_directory, move_into_place

#: Maximum size of a weight file, in bytes.
SHARD_BYTES = 5 * 10**9
#: Keys of ``config.json`` that other programs need, and that Transformers reads but does not write.
_DROPPED = ("full_attention_interval",)
#: Checkpoint files that configure the preprocessing of images, video and audio.
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def export_checkpoint(
    model: nn.Module,
    tokenizer: Any,
    directory: Path | str,
    shard_bytes: int = SHARD_BYTES,
    units: Iterator[WeightUnit] | None = None,
) -> None:
    """Write a checkpoint to ``directory``, which appears complete or not at all.

    Args:
        model: the model; its tensors keep their dtypes.
        tokenizer: a Transformers tokenizer, or None to omit it.
        directory: target; must not exist or be empty.
        shard_bytes: maximum size of a weight file.
        units: the weights to write, in order, with their names; by default the model's.

    Raises:
        CheckpointError: the target is not empty, is in use by another export, or cannot be written.
    """
    directory = Path(os.path.realpath(directory))
    work = staging_path(directory, "exporting")
    if is_occupied(directory, work):
        raise CheckpointError(f"{directory} already exists and is not empty; choose another directory for the export")
    lock = -1
    try:
        lock = lock_directory(work)
        for left in work.iterdir():  # left by a process that died
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


def _write(model: nn.Module, tokenizer: Any, directory: Path, shard_bytes: int, units: Iterator[WeightUnit]) -> None:
    configuration(model).save_pretrained(directory)
    generation: Any = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    source = Path(getattr(configuration(model), "_name_or_path", ""))
    for name in PROCESSORS:  # the towers are not trained, so copy their files
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if (source / "config.json").is_file() and source != Path():
        _restore_keys(source / "config.json", directory / "config.json")
        export_code(source, directory, trusted=is_remote(model) or is_remote(tokenizer))
    _write_shards(units, directory, shard_bytes)


def _restore_keys(source: Path, target: Path) -> None:
    """Copy the keys that Transformers does not write, of the model and of its language model, from the configuration it was loaded from."""
    before, after = (json.loads(path.read_text(encoding="utf-8")) for path in (source, target))
    for given, written in ((before, after), (before.get("text_config") or {}, after.get("text_config") or {})):
        written.update({key: given[key] for key in _DROPPED if key in given})
    target.write_text(json.dumps(after, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_shards(units: Iterator[WeightUnit], directory: Path, shard_bytes: int) -> None:
    """Write a stream of tensors as safetensors files, with an index if there are several.

    The number of files is known only at the end of the stream, so they are renamed then.
    """
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
