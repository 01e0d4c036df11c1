"""Save and load the state of a trainer: weights, optimizer tensors, random-number states, and the step as JSON.

If tensors are sharded, each rank writes its rows to its own file (``model.0-of-2.safetensors``); the full tensor consists of these rows
in rank order. When loading, a rank reads its rows from all files that contain them, so the number of ranks and the sharding strategy
may change between saving and loading.
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from miles_core.checkpoint.rng import get_rng, put_rng
from miles_core.checkpoint.store import Store
from miles_core.checkpoint.tensor_file import write_tensors
from miles_core.data.world import World
from miles_core.errors import CheckpointError
from miles_embedded.model.storage import LocalShard, is_constant, local_shard
from miles_embedded.model.views import sources
from miles_embedded.trainer.optimizer import Optimizer

WEIGHTS, MOMENTS, STEP, RANDOM = "model", "optimizer", "trainer.json", "random"

log = logging.getLogger(__name__)


def save(model: nn.Module, optimizer: Optimizer, directory: Path, world: World) -> None:
    """Write this rank's files to ``directory``, creating it if necessary. The caller provides atomicity (a new directory)."""
    directory.mkdir(parents=True, exist_ok=True)
    put_rng(Store(directory / RANDOM, world), sharded=True)
    weights = _changing(model)
    files = world.size if any(own.sharded for own in weights.values()) else 1
    if world.rank >= files:
        return  # rank 0 writes replicated tensors
    # tensors that are replicated on every rank, such as buffers, are written by rank 0
    tensors = {n: own.tensor for n, own in weights.items() if own.sharded or world.rank == 0}
    write_tensors(tensors, _file(directory, WEIGHTS, world.rank, files))
    with optimizer.on_device():
        moments = optimizer.tensors()
        write_tensors(moments, _file(directory, MOMENTS, world.rank, files))
    if world.rank == 0:
        noted: dict[str, Any] = {
            "step": optimizer.step_number,
            "files": files,
            "ranks": world.size,
            "tensors": len(moments),
        }
        if optimizer.loss_scale is not None:
            noted["loss_scale"] = optimizer.loss_scale.state()
        (directory / STEP).write_text(json.dumps(noted))


def load(model: nn.Module, optimizer: Optimizer, directory: Path, world: World) -> None:
    """Load the files that ``save`` wrote, on any number of ranks; for a frozen model only its weights.

    Raises:
        CheckpointError: files are missing, damaged or of another model.
    """
    noted = _read_step(directory)
    try:
        with ExitStack() as stack:
            weights = _ShardedFiles(directory, WEIGHTS, noted["files"], stack)
            if not optimizer.masters:
                return _load_weights(model, weights)
            moments = _ShardedFiles(directory, MOMENTS, noted["files"], stack)
            if len(moments) != noted["tensors"]:
                raise CheckpointError(
                    f"{directory}: {MOMENTS} has {len(moments)} tensors where {noted['tensors']} were saved"
                )
            _load_weights(model, weights)
            found = {n: moments.rows(n, optimizer.shard_of(n), exact=n.startswith("master.")) for n in moments.names}
            optimizer.restore(found, noted["step"])
            if optimizer.loss_scale is not None and "loss_scale" in noted:
                optimizer.loss_scale.load_state(noted["loss_scale"])
    except SafetensorError as error:
        raise CheckpointError(f"{directory}: a file is damaged or truncated ({error})") from error
    except KeyError as error:
        raise CheckpointError(
            f"{directory}: {MOMENTS} has no tensor {error}; the saved run had another model, --dtype or optimizer: give its values again"
        ) from error
    if world.rank < noted["ranks"]:
        get_rng(Store(directory / RANDOM, World(world.rank, noted["ranks"])))
    else:
        log.warning("%s has no random-number state of rank %d, which continues with its own", directory, world.rank)


def _read_step(directory: Path) -> dict[str, Any]:
    file = directory / STEP
    if not file.is_file():
        raise CheckpointError(f"{directory}: it has no {STEP}; is this a trainer checkpoint of the embedded backend?")
    try:
        noted = json.loads(file.read_text())
        return {**noted, **{name: int(noted[name]) for name in ("step", "files", "ranks", "tensors")}}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged or has another version ({error!r})") from error


def _changing(model: nn.Module) -> dict[str, LocalShard]:
    """Return this rank's part of the tensors that a checkpoint contains: all except constant ones."""
    return {name: local_shard(tensor) for name, tensor in sources(model).items() if not is_constant(tensor)}


@torch.no_grad()
def _load_weights(model: nn.Module, weights: _ShardedFiles) -> None:
    own = _changing(model)
    missing, foreign = [n for n in own if n not in weights.names], [n for n in weights.names if n not in own]
    if missing or foreign:
        why = f"lack {missing[0]}" if missing else f"contain {foreign[0]}, which the model lacks"
        raise CheckpointError(f"{weights.directory}: the weights {why}; they belong to another model")
    for name, mine in own.items():
        mine.tensor.copy_(weights.rows(name, mine))


class _ShardedFiles:
    """Tensors whose rows may be spread over several files, in file order."""

    def __init__(self, directory: Path, kind: str, count: int, stack: ExitStack) -> None:
        self.directory = directory
        files = [_file(directory, kind, number, count) for number in range(count)]
        absent = next((file.name for file in files if not file.is_file()), None)
        if absent is not None:
            raise CheckpointError(
                f"{directory}: {absent} is missing, though {STEP} lists it; use an earlier checkpoint"
            )
        opened: list[Any] = [stack.enter_context(safe_open(file, "pt")) for file in files]
        self.names: dict[str, list[Any]] = {}
        for file in opened:
            for name in file.keys():  # noqa: SIM118 - not a dict
                self.names.setdefault(name, []).append(file)

    def __len__(self) -> int:
        return len(self.names)

    def rows(self, name: str, mine: LocalShard | None, exact: bool = True) -> Tensor:
        """Return the local rows of a tensor; the full tensor if ``mine`` is None. Unless ``exact``, the tensor may have another shape than
        the parameter; without its number of rows it is read as a whole, from the first file."""
        files = self.names[name]
        if mine is None:
            return files[0].get_tensor(name)
        slices = [file.get_slice(name) for file in files]
        shapes = [tuple(part.get_shape()) for part in slices]
        saved = (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()
        if not exact and saved[:1] != mine.shape[:1]:
            return files[0].get_tensor(name)
        if exact and saved != mine.shape:
            raise CheckpointError(
                f"{self.directory}: {name} has shape {list(saved)}, the model's is {list(mine.shape)}; it is another model"
            )
        if not saved:
            return files[0].get_tensor(name)
        first, last, start, parts = mine.first, mine.first + len(mine.tensor), 0, []
        for part, shape in zip(slices, shapes, strict=True):
            low, high = max(first - start, 0), min(last - start, shape[0])
            if low < high:
                parts.append(part[low:high])
            start += shape[0]
        return torch.cat(parts) if parts else mine.tensor.new_empty(0, *saved[1:]).cpu()


def _file(directory: Path, kind: str, number: int, count: int) -> Path:
    return directory / (f"{kind}.{number}-of-{count}.safetensors" if count > 1 else f"{kind}.safetensors")
