"""How fast the Megatron trainer saves and loads its state on two ranks that divide the experts, by part.

Ranks write as in a run, where every file is hashed (``Saving``). ``gathered`` is the optimizer state in Megatron-Core's format that other
parallel sizes can load (``fully_reshardable``), as earlier versions saved it; ``save`` and ``load`` are the trainer's. Seconds are those of
the slower rank. On GPUs the model is that of ``cluster_run.py`` (1.1 B parameters); ``--size`` chooses a smaller one. The script starts its
ranks itself::

    python benchmarks/training/megatron_checkpoint.py --directory /dev/shm --save
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import finish, installed, options
from benchmarks.planning.cluster_options import SIZES
from benchmarks.planning.cluster_run import make_model, parameters_of
from benchmarks.training.megatron_divisions import launch, make_trainer


def measure(trainer: Any, directory: Path, gathered: bool) -> dict[str, float]:
    """Return the seconds of each part of this rank."""
    import torch.distributed as dist

    from miles_core.checkpoint.tensor_file import Saving
    from miles_megatron.trainer import checkpoint, moments
    from miles_megatron.trainer.without_cuda import without_cuda

    found: dict[str, float] = {}

    def timed(name: str, work: Any) -> None:
        dist.barrier()
        start = time.perf_counter()
        with without_cuda():
            work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier()
        found[name] = round(time.perf_counter() - start, 2)

    def save(path: Path, later: bool = False) -> Saving:
        path.mkdir(exist_ok=True)
        dist.barrier()
        with Saving(path, later) as saving:
            trainer.save(path)
        return saving

    optimizers = checkpoint._optimizers(trainer)
    timed("save", lambda: save(directory / "state"))
    timed("save again", lambda: save(directory / "again"))
    timed("optimizer of it", lambda: moments.save_moments(optimizers, directory / "again" / checkpoint.MOMENTS))
    timed("copy with --async-save", lambda: save(directory / "later", later=True))
    timed("load", lambda: trainer.load(directory / "state"))
    if gathered:
        timed("gathered", lambda: save_gathered(trainer, directory / "gathered"))
    return found


def save_gathered(trainer: Any, directory: Path) -> None:
    """Save the optimizer state in Megatron-Core's format, and hash it."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from miles_core.checkpoint.tensor_file import Saving
    from miles_core.trainer import record_files
    from miles_megatron.trainer.checkpoint import _state_of

    directory.mkdir(exist_ok=True)
    dist.barrier()
    model = _state_of(trainer, trainer.chunks[0])
    how = {"distrib_optim_sharding_type": "fully_reshardable"}
    parts = [part.sharded_state_dict(model, metadata=how) for part in trainer.optimizer.inner.chained_optimizers]
    state = {str(i): part["param_state"] for i, part in enumerate(parts)}
    with Saving(directory):
        dist_checkpointing.save(state, str(directory))
        record_files(directory.glob(f"__{dist.get_rank()}_*"))


def rank(directory: Path, gathered: bool) -> None:
    """Measure on one rank; the first one writes the slowest times."""
    import torch.distributed as dist

    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    trainer = make_trainer(directory / "model", {"ep": 2})
    mine, every = measure(trainer, directory, gathered), [None, None]
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        slowest = {name: max(each[name] for each in every) for name in mine}  # type: ignore[index]
        sizes = {name: _size(directory / "state" / name) for name in ("state", "moments")}
        (directory / "found.json").write_text(json.dumps({"seconds": slowest, "bytes": sizes}))
    dist.destroy_process_group()


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    parser.add_argument("--checkpoint", type=Path, help="directory of the model; made if it does not exist")
    parser.add_argument("--no-gathered", action="store_true", help="leave Megatron-Core's format out")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ranks:
        rank(given.ranks, not given.no_gathered)
        return
    with tempfile.TemporaryDirectory(dir=given.directory) as name:
        scratch = Path(name)
        checkpoint = make_model(given.size, given.checkpoint or scratch / "model")
        if given.checkpoint:
            (scratch / "model").symlink_to(checkpoint.absolute())
        flags = ["--ranks", str(scratch), *(["--no-gathered"] if given.no_gathered else [])]
        launch(2, Path(__file__), flags)
        found = json.loads((scratch / "found.json").read_text())
        parameters, free = parameters_of(checkpoint), shutil.disk_usage(scratch).total
    seconds, size = found["seconds"], sum(found["bytes"].values())
    rates = {name: round(size / seconds[name] / 1e9, 2) for name in ("save", "save again", "load")}
    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "none"
    result = {"gpus": gpus, "parameters": parameters, "disk": free, **found, "gb_per_second": rates}
    finish("megatron_checkpoint", result, given.save, lambda: installed("megatron-core", "torch"), given.size)


if __name__ == "__main__":
    main()
