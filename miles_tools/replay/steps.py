"""The directory of recorded steps.

``RUN/steps/00000012`` holds step 12: ``samples`` (all attributes and recorded fields), ``trained`` (log-probabilities and advantages of
the loss), ``sums.POLICY.RANK.json`` (checksums of gradients and weights of a trainer rank) and, for the weights that the engine received
after the step, ``engine.POLICY.json``; step 0 has the engine's first weights. A step is complete when its ``samples`` entry is.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.errors import CheckpointError, MilesError

if TYPE_CHECKING:
    from miles_core.contracts.runtime import TrainedTokens
    from miles_core.data.sample import Sample

DIRECTORY = "steps"
FORMAT_FILE = "format.json"
#: Version of the layout; a reader refuses newer ones.
FORMAT = 1
SAMPLES, TRAINED = "samples", "trained"
#: Columns of the entry ``trained``, which are attributes of ``TrainedTokens``.
COLUMNS = ("log_probs", "advantages")


def step_directory(run_dir: Path, step: int) -> Path:
    """Return the directory of a recorded step, whether it exists or not."""
    return run_dir / DIRECTORY / f"{step:08d}"


def step_directories(run_dir: Path) -> dict[int, Path]:
    """Return step -> directory of all recorded steps, complete or not, in ascending order."""
    found = (run_dir / DIRECTORY).glob("[0-9]*")
    return dict(sorted((int(path.name), path) for path in found if path.name.isdigit()))


def recorded_steps(run_dir: Path) -> list[int]:
    """Return the steps whose samples are complete, in ascending order."""
    return [step for step, path in step_directories(run_dir).items() if (path / f"{SAMPLES}.json").is_file()]


def write_samples(run_dir: Path, step: int, samples: Sequence[Sample], trained: Sequence[TrainedTokens | None]) -> None:
    """Write the samples of a step, and the values of training for each.

    Raises:
        MilesError: the directory cannot be written, or a sample holds a value that cannot be stored.
    """
    import numpy as np
    import torch

    from miles_core.checkpoint.samples import put_samples
    from miles_core.checkpoint.store import Store

    tensors, lengths = {}, {}
    for name in COLUMNS:
        values = [None if each is None else getattr(each, name) for each in trained]
        lengths[name] = [None if value is None else len(value) for value in values]
        if any(lengths[name]):
            tensors[name] = torch.from_numpy(np.concatenate([v for v in values if v is not None]).astype(np.float32))
    with _writing(run_dir, step) as directory:
        for entry in (SAMPLES, TRAINED):  # of the same step before a resume
            (directory / f"{entry}.json").unlink(missing_ok=True)
        store = Store(directory)
        store.put(TRAINED, tensors, lengths)
        put_samples(store, SAMPLES, samples)


def write_sums(run_dir: Path, step: int, name: str, data: Mapping[str, Any]) -> None:
    """Replace the file ``name.json`` of a step's checksums at once, so that a killed process leaves no partial one.

    Raises:
        MilesError: the directory cannot be written.
    """
    with _writing(run_dir, step) as directory:
        _write_json(directory / f"{name}.json", data)


@contextmanager
def _writing(run_dir: Path, step: int) -> Iterator[Path]:
    """Context that creates the directory of a step; an ``OSError`` in it becomes a ``MilesError``."""
    directory = step_directory(run_dir, step)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not (file := run_dir / DIRECTORY / FORMAT_FILE).is_file():
            _write_json(file, {"format": FORMAT})
        yield directory
    except OSError as error:
        raise MilesError(
            f"cannot record step {step} in {run_dir}: {error.strerror or error}; free space there and resume the run, or resume it with "
            "--no-record-steps"
        ) from error


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    part.write_text(json.dumps(data), encoding="utf-8")
    part.replace(file)


def read_samples(run_dir: Path, step: int) -> list[Sample]:
    """Return the samples of a recorded step with all their fields.

    Raises:
        MilesError: the step was not recorded, or its files are damaged.
    """
    from miles_core.checkpoint.samples import get_samples
    from miles_core.checkpoint.store import Store

    check_recorded(run_dir, step)
    try:
        return get_samples(Store(step_directory(run_dir, step)), SAMPLES)
    except (CheckpointError, KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise _damaged(run_dir, step, error) from error


def read_trained(run_dir: Path, step: int) -> dict[str, list[Any]]:
    """Return the values of training for each sample of a recorded step: ``COLUMNS`` -> float32 [response_length] or None per sample.

    Raises:
        MilesError: as for ``read_samples``.
    """
    import numpy as np

    from miles_core.checkpoint.store import Store

    check_recorded(run_dir, step)
    try:
        tensors, lengths = Store(step_directory(run_dir, step)).get(TRAINED)
        columns: dict[str, list[Any]] = {}
        for name in COLUMNS:
            parts: Iterator[Any] = iter(())
            if name in tensors:
                ends = np.cumsum([n for n in lengths[name] if n is not None])
                parts = iter(np.split(tensors[name].numpy(), ends[:-1]))
            columns[name] = [None if n is None else next(parts, np.zeros(0, np.float32)) for n in lengths[name]]
        return columns
    except (CheckpointError, KeyError, ValueError, TypeError) as error:
        raise _damaged(run_dir, step, error) from error


def check_recorded(run_dir: Path, step: int) -> None:
    """Raise MilesError unless the step's samples are recorded."""
    known = recorded_steps(run_dir)
    if step not in known:
        if not known:
            raise MilesError(f"{run_dir}: this run recorded no step; record steps with --record-steps")
        raise MilesError(f"{run_dir}: step {step} was not recorded; recorded: {describe_steps(known)}")


def describe_steps(steps: Sequence[int]) -> str:
    """Return "step 3", "steps 1 to 8", or "8 steps between 1 and 20" if some between are missing."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) == steps[-1] - steps[0] + 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"{len(steps)} steps between {steps[0]} and {steps[-1]}"


def measure_steps(run_dir: Path, steps: Iterable[int] | None = None) -> dict[int, int]:
    """Return step -> bytes of its directory, for those of ``steps`` that have one (default: all)."""
    found = step_directories(run_dir) if steps is None else {step: step_directory(run_dir, step) for step in steps}
    return {step: sum(file.stat().st_size for file in path.iterdir()) for step, path in found.items() if path.is_dir()}


def delete_steps(run_dir: Path, chosen: Callable[[int], bool]) -> None:
    """Delete the directories of the steps for which ``chosen`` returns True."""
    for step, path in step_directories(run_dir).items():
        if chosen(step):
            shutil.rmtree(path, ignore_errors=True)


def _damaged(run_dir: Path, step: int, error: Exception) -> MilesError:
    return MilesError(
        f"{step_directory(run_dir, step)}: the files of this step are damaged or incomplete ({error}); use another step"
    )
