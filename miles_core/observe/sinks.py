"""Optional metric sinks: TensorBoard and Weights & Biases. Their packages are imported only if the sink is enabled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core.errors import MilesError
from miles_core.redact import redact_values

#: File with the id of a run at Weights & Biases.
WANDB_ID = "wandb_id"


class TensorBoard:
    """Writes scalars as TensorBoard event files into ``directory``. Raises MilesError without the package."""

    def __init__(self, directory: Path | str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("--use-tensorboard", "tensorboard", error) from error
        self._writer = SummaryWriter(log_dir=str(directory))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """Sends scalars to a run of Weights & Biases. Raises MilesError without the package.

    Args:
        directory: directory for local files and the run's id, with which a resumed run continues the same W&B run.
        name: name of the W&B run.
        config: the effective configuration.
        project, group: project and group of the W&B run.
    """

    def __init__(
        self, directory: Path, name: str, config: Mapping[str, Any], project: str, group: str | None = None
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("--use-wandb", "wandb", error) from error
        file = directory / WANDB_ID
        known = file.read_text(encoding="utf-8").strip() if file.is_file() else None
        self._run = wandb.init(
            project=project,
            group=group,
            name=name,
            id=known or None,
            dir=str(directory),
            config=redact_values(dict(config)),
            resume="allow",
        )
        file.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send one step's metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


def _missing(flag: str, package: str, error: ImportError) -> MilesError:
    return MilesError(
        f"{flag} needs the package {package!r}, which cannot be imported here ({error}); run: pip install {package}"
    )
