"""Saves and loads a trainer's state as Megatron-Core distributed checkpoint, and exports Hugging Face checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from safetensors.torch import save_file
from torch import Tensor, nn

from miles_core.data import WeightUnit
from miles_core.plugin import CheckpointError, Store
from miles_core.trainer import World, get_rng, put_rng, record_files
from miles_megatron.trainer.matrices import added_state
from miles_megatron.trainer.moments import ParameterBlocks, load_moments, save_moments
from miles_megatron.trainer.mtp import Mtp
from miles_megatron.trainer.optimizer import Optimizer
from miles_megatron.trainer.weights import Weights

STATE, STEP, RANDOM, MOMENTS = "state", "trainer.json", "random", "moments"
#: Maximum bytes of one file of an export.
SHARD = 4 << 30


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint of one rank contains."""

    chunks: Sequence[nn.Module]
    weights: Weights
    optimizer: Optimizer
    mtp: Mtp | None
    world: World


def save(state: TrainerState, directory: Path) -> None:
    """Save weights, optimizer state, random-number states and the step number. A collective of all ranks.

    Weights are a distributed checkpoint of Megatron-Core, without data-parallel copies; see ``moments`` for the optimizer state.
    The caller provides a new directory and is responsible for atomicity."""
    target, sharded, optimizers = directory / STATE, _sharded(state), _optimizers(state)
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
        (directory / MOMENTS).mkdir(exist_ok=True)
        (directory / STEP).write_text(
            json.dumps(
                {
                    "step": state.optimizer.step_number,
                    "moments": state.optimizer.steps,
                    "ranks": dist.get_world_size(),
                }
            )
        )
    dist.barrier()
    put_rng(Store(directory / RANDOM, state.world), sharded=True)
    save_moments(optimizers, directory / MOMENTS)
    _write_in_this_process()
    dist_checkpointing.save(sharded, str(target))
    record_files(target.glob(f"__{dist.get_rank()}_*"))


def _write_in_this_process() -> None:
    """Let Megatron-Core collect the results of its writers without a process of its own, which takes seconds to start: they are threads."""
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = SimpleQueue()


def load(state: TrainerState, directory: Path) -> None:
    """Load what ``save`` wrote, also with other parallel sizes.

    Raises:
        CheckpointError: a file is missing, or the checkpoint belongs to another model."""
    if not (directory / STEP).is_file():
        raise CheckpointError(f"{directory}: it has no {STEP}; is this a trainer checkpoint of --trainer megatron?")
    try:
        found = dist_checkpointing.load(_sharded(state), str(directory / STATE))
    except Exception as error:  # Megatron-Core has no exception class for load errors
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{directory}: {STATE} cannot be loaded into this model ({why})") from error
    noted = json.loads((directory / STEP).read_text())
    load_moments(_optimizers(state), directory / MOMENTS, noted["moments"])
    for number, chunk in enumerate(state.chunks):
        chunk.load_state_dict(found[f"model{number}"], strict=False)
    if (mtp := state.mtp) is not None and mtp.layer.here:
        mtp.layer.load_state_dict(found["mtp"], strict=False)
    if dist.get_rank() < noted["ranks"]:
        get_rng(Store(directory / RANDOM, World(dist.get_rank(), noted["ranks"])))
    state.optimizer.step_number = int(noted["step"])


def _sharded(state: TrainerState) -> dict[str, Any]:
    """Return the sharded state of the weights."""
    sharded: dict[str, Any] = {f"model{n}": _state_of(state, chunk) for n, chunk in enumerate(state.chunks)}
    if (mtp := state.mtp) is not None and mtp.layer.here:
        sharded["mtp"] = mtp.layer.sharded_state_dict()
    return sharded


def _optimizers(state: TrainerState) -> dict[str, tuple[Optimizer, ParameterBlocks]]:
    """Return the optimizers of this rank with allocated moments, and the blocks of their parameters."""
    sharded = {str(n): _state_of(state, chunk) for n, chunk in enumerate(state.chunks)}
    found = {"policy": (state.optimizer, ParameterBlocks(sharded))}
    if (mtp := state.mtp) is not None and mtp.layer.here:
        found["mtp"] = (mtp.optimizer, ParameterBlocks(mtp.layer.sharded_state_dict()))
    for optimizer, _ in found.values():
        optimizer.allocate()
    return found


def _state_of(state: TrainerState, chunk: Any) -> dict[str, Any]:
    """Return the sharded state of a chunk, without its own weights if plugins train nothing but the parameters that they added."""
    added = added_state(state.weights, chunk)
    trained = sum(parameter.requires_grad for parameter in chunk.parameters())
    return added if added and trained == len(added) else {**chunk.sharded_state_dict(), **added}


def export(weights: Weights, units: Iterable[WeightUnit], source: Path, directory: Path, tokenizer: Any) -> None:
    """Write a Hugging Face checkpoint: weight files of at most ``SHARD`` bytes, the source's configuration files, and the tokenizer.

    A collective of all ranks; rank 0 writes. units: see ``Trainer.export``; source: the checkpoint that the model was loaded from."""
    writer, copies = _Writer(directory) if dist.get_rank() == 0 else None, weights.copies()
    for unit in units:
        for name, tensor in unit.tensors.items() if writer else ():
            assert writer is not None
            for each in (name, *copies.get(name, ())):
                writer.add(each, tensor)
    if writer is not None:
        for name, tensor in weights.untrained():
            writer.add(name, tensor)
        writer.finish()
        for file in ("config.json", "generation_config.json"):
            if (source / file).is_file():
                shutil.copy(source / file, directory / file)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
    dist.barrier()


class _Writer:
    """Writes tensors to safetensors files, with an index if there are several files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._current: dict[str, Tensor] = {}
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a copy of a tensor; writes the current file first if it would exceed ``SHARD`` bytes."""
        if self._current and sum(t.nbytes for t in self._current.values()) + tensor.nbytes > SHARD:
            self._flush()
        self._current[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def _flush(self) -> None:
        save_file(self._current, self._directory / f"{len(self._files)}.part", metadata={"format": "pt"})
        self._files.append(list(self._current))
        self._current = {}

    def finish(self) -> None:
        """Write the last file, rename all files to their final names, and write the index."""
        self._flush()
        count, where = len(self._files), {}
        for number, names in enumerate(self._files):
            file = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._directory / f"{number}.part").rename(self._directory / file)
            where.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {}, "weight_map": where}
            (self._directory / "model.safetensors.index.json").write_text(json.dumps(index))
