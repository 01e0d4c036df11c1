"""A plugin-based reinforcement-learning loop for language models.

What plugin authors need, importable from here. Names are looked up when first used, so that a manifest (``Plugin``,
``Rule``, ``option``, ...) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from miles_core.version import __version__

if TYPE_CHECKING:
    from miles_core.algorithm.correction import Correction, CorrectionInputs, Needs, compose_corrections
    from miles_core.contracts.engine import Engine, Request, Response, Sampling
    from miles_core.contracts.policy import Policy
    from miles_core.contracts.run import Run
    from miles_core.contracts.runtime import Runtime
    from miles_core.contracts.trainer import Context, Loss, Output, Trainer
    from miles_core.contracts.transport import Transport
    from miles_core.data.batch import Batch
    from miles_core.data.field import Field
    from miles_core.data.sample import Sample, Status
    from miles_core.data.unit import Unit
    from miles_core.errors import MilesError
    from miles_core.plugin.manifest import Pair, Plugin, Rule, Set
    from miles_core.plugin.marker import hookimpl
    from miles_core.plugin.option import option
    from miles_core.precision.format import Format
    from miles_core.stash import StashKey


#: module -> the names it gives to this one.
_PUBLIC = {
    "algorithm.correction": ("Correction", "CorrectionInputs", "Needs", "compose_corrections"),
    "plugin.option": ("option",),
    "data.batch": ("Batch",),
    "data.field": ("Field",),
    "data.sample": ("Sample", "Status"),
    "errors": ("MilesError",),
    "plugin.marker": ("hookimpl",),
    "plugin.manifest": ("Pair", "Plugin", "Rule", "Set"),
    "contracts.policy": ("Policy",),
    "precision.format": ("Format",),
    "contracts.engine": ("Engine", "Request", "Response", "Sampling"),
    "contracts.run": ("Run",),
    "contracts.runtime": ("Runtime",),
    "stash": ("StashKey",),
    "contracts.transport": ("Transport",),
    "data.unit": ("Unit",),
    "contracts.trainer": ("Context", "Loss", "Output", "Trainer"),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [
    "Batch",
    "Context",
    "Correction",
    "CorrectionInputs",
    "Engine",
    "Field",
    "Format",
    "Loss",
    "MilesError",
    "Needs",
    "Output",
    "Pair",
    "Plugin",
    "Policy",
    "Request",
    "Response",
    "Rule",
    "Run",
    "Runtime",
    "Sample",
    "Sampling",
    "Set",
    "StashKey",
    "Status",
    "Trainer",
    "Transport",
    "Unit",
    "__version__",
    "compose_corrections",
    "hookimpl",
    "option",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"miles_core has no {name!r}")
    value = getattr(import_module(f"miles_core.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
