"""The test kit for plugin authors.

``toy_run`` and ``plan`` are pytest fixtures once miles-core is installed, and functions here. ``EngineContract``,
``TrainerContract`` and ``FormatContract`` are suites an implementation is run through. Importing this imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from miles_core.testing.toy import ToyRun, plan, toy_files, toy_run

if TYPE_CHECKING:
    from miles_core.testing.engine_contract import EngineContract
    from miles_core.testing.format_contract import FormatContract
    from miles_core.testing.trainer_contract import TrainerContract

__all__ = ["EngineContract", "FormatContract", "ToyRun", "TrainerContract", "plan", "toy_files", "toy_run"]


def __getattr__(name: str) -> Any:
    """The suites, which import torch, when they are first asked for."""
    if name not in ("EngineContract", "FormatContract", "TrainerContract"):
        raise AttributeError(f"miles_core.testing has no {name!r}")
    return getattr(import_module(f"miles_core.testing.{name.removesuffix('Contract').lower()}_contract"), name)
