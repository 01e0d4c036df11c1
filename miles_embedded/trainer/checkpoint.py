"""A trainer's state on disk: weights in the checkpoint's layout, the optimiser's tensors, and the step as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from miles_core.errors import CheckpointError
from miles_embedded.model.views import Loader, export
from miles_embedded.trainer.optimizer import Optimizer

WEIGHTS, MOMENTS, STEP = "model.safetensors", "optimizer.safetensors", "trainer.json"


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Write the three files into ``directory``, which is made if need be. Atomicity is the caller's (a fresh directory)."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {n: t.contiguous() for unit in export(model) for n, t in unit.tensors.items()}
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    moments = {n: t.contiguous() for n, t in optimizer.tensors().items()}
    save_file(moments, directory / MOMENTS)
    (directory / STEP).write_text(json.dumps({"step": optimizer.step_number, "tensors": len(moments)}))


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Inverse of ``save``. CheckpointError names what is missing, damaged or of another model."""
    for name in (WEIGHTS, MOMENTS, STEP):
        if not (directory / name).is_file():
            raise CheckpointError(
                f"{directory}: it has no {name}; is this a trainer checkpoint of the embedded backend?"
            )
    try:
        load_weights(model, directory / WEIGHTS)
        noted, moments = json.loads((directory / STEP).read_text()), load_file(directory / MOMENTS)
        if len(moments) != noted["tensors"]:
            raise ValueError(f"{len(moments)} tensors where {noted['tensors']} were saved")
        optimizer.restore(moments, int(noted["step"]))
    except SafetensorError as error:
        raise CheckpointError(f"{directory}: a file is damaged or truncated ({error})") from error
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{directory}: {MOMENTS} or {STEP} does not belong to this model ({error})") from error


def load_weights(model: nn.Module, file: Path) -> None:
    """Read one safetensors file in checkpoint layout into ``model``; every tensor must be there."""
    loader = Loader(model)
    with safe_open(file, "pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dict
            loader.put(name, opened.get_tensor(name))
    missing = loader.missing()
    if missing:
        raise CheckpointError(f"{file}: {len(missing)} tensors are missing, first {missing[0]}")
