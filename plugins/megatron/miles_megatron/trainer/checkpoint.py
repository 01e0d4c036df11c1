"""A trainer's state in Megatron-Core's distributed checkpoints, and export in the Hugging Face layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from safetensors.torch import save_file
from torch import Tensor

from miles_core import CheckpointError

if TYPE_CHECKING:
    from miles_megatron.trainer.trainer import MegatronTrainer

STATE, STEP = "state", "trainer.json"
#: Moments and masters are written as whole tensors, so that other parallel sizes can read them.
_RESHARDABLE = {"distrib_optim_sharding_type": "fully_reshardable"}
#: Bytes of one file of an export.
SHARD = 4 << 30


def save(trainer: MegatronTrainer, directory: Path) -> None:
    """Weights, optimiser and the schedule's position; atomicity is the caller's (a fresh directory)."""
    target = directory / STATE
    if dist.get_rank() == 0:
        target.mkdir(parents=True, exist_ok=True)
        (directory / STEP).write_text(json.dumps({"step": trainer.optimizer.step_number}))
    dist.barrier()
    dist_checkpointing.save(_sharded(trainer, loading=False), str(target))


def load(trainer: MegatronTrainer, directory: Path) -> None:
    """Inverse of ``save``, also with other parallel sizes. CheckpointError names what is missing or of another model."""
    if not (directory / STEP).is_file():
        raise CheckpointError(f"{directory}: it has no {STEP}; is this a trainer checkpoint of --trainer megatron?")
    try:
        found = dist_checkpointing.load(_sharded(trainer, loading=True), str(directory / STATE))
    except Exception as error:
        raise CheckpointError(f"{directory}: {STATE} does not belong to this model ({error})") from error
    for number, chunk in enumerate(trainer.chunks):
        chunk.load_state_dict(found[f"model{number}"], strict=False)
    trainer.optimizer.inner.load_state_dict(found["optimizer"])
    trainer.optimizer.separate_counts()
    trainer.optimizer.step_number = int(json.loads((directory / STEP).read_text())["step"])


def _sharded(trainer: MegatronTrainer, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    trainer.optimizer.allocate()
    for number, chunk in enumerate(trainer.chunks):
        model: Any = chunk
        state[f"model{number}"] = model.sharded_state_dict()
    plain = state["model0"] if len(trainer.chunks) == 1 else dict(state.items())
    state["optimizer"] = trainer.optimizer.inner.sharded_state_dict(plain, is_loading=loading, metadata=_RESHARDABLE)
    return state


def export(trainer: MegatronTrainer, directory: Path, tokenizer: Any) -> None:
    """Write a Hugging Face checkpoint: files of at most ``SHARD`` bytes, their index, and what the source has beside weights."""
    writer = dist.get_rank() == 0
    files: list[dict[str, Tensor]] = [{}]
    names: dict[str, str] = {}
    filled = 0
    if writer:
        directory.mkdir(parents=True, exist_ok=True)

    def flush(final: bool = False) -> None:
        nonlocal filled
        name = f"model-{len(files):05d}.safetensors"
        save_file(files[-1], directory / name, metadata={"format": "pt"})
        names.update(dict.fromkeys(files[-1], name))
        files[-1] = {}
        if not final:
            files.append({})
        filled = 0

    for unit in trainer.units(everywhere=trainer.s.pp > 1):
        for name, tensor in unit.tensors.items() if writer else ():
            if filled and filled + tensor.nbytes > SHARD:
                flush()
            files[-1][name] = tensor.detach().to("cpu", copy=True).contiguous()
            filled += tensor.nbytes
    if writer:
        flush(final=True)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        for file in ("config.json", "generation_config.json"):
            if (trainer.source / file).is_file():
                shutil.copy(trainer.source / file, directory / file)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
    dist.barrier()
