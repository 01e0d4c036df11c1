"""Imports Transformers without packages that its model classes do not use, because importing them can take seconds.

Wherever they are installed, Transformers imports scikit-learn with SciPy and pandas for one function of assisted generation, and SciPy for
one function of detection losses; here these functions import them when they are called. Its first module lists the files of all installed
distributions to find the versions of a few packages; here this happens if a package has no distribution of the same name. It reads the
files of all models once for ``transformers`` and again for ``transformers.models``; here the second time uses the result of the first.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

__all__ = ["import_transformers"]

#: Packages that only the distribution of the same name contains.
NAMED_ALIKE = frozenset(
    {"accelerate", "kernels", "numpy", "peft", "safetensors", "tokenizers", "torch", "torchao", "torchvision", "triton"}
)
#: Module -> check in ``transformers.utils`` -> what the module imports if the check is true.
DEFERRED = {
    "transformers.generation.candidate_generator": {"is_sklearn_available": ("sklearn.metrics", "roc_curve")},
    "transformers.loss.loss_utils": {"is_scipy_available": ("scipy.optimize", "linear_sum_assignment")},
}


def import_transformers() -> None:
    """Import Transformers and the modules of ``DEFERRED``. Modules that are imported already, and those that a version of Transformers does
    not have, stay as they are."""
    if "transformers" not in sys.modules:
        find = importlib.metadata.packages_distributions
        importlib.metadata.packages_distributions = lambda: Distributions(find)
        try:
            importlib.import_module("transformers")
        finally:
            importlib.metadata.packages_distributions = find
        _read_models_once()
    for module, functions in DEFERRED.items():
        if module not in sys.modules and importlib.util.find_spec(module) is not None:
            _import_deferring(module, functions)


def _read_models_once() -> None:
    """Call the function that reads a package's files with the package's folder, even if the caller passes the package's first file. It
    keeps its results by
    argument, so the second call for the folder of all models reads nothing."""
    utils = importlib.import_module("transformers.utils.import_utils")
    read: Callable[[Path], Any] | None = getattr(utils, "create_import_structure_from_path", None)
    if read is not None:

        def read_folder(path: str | Path) -> Any:
            return read(Path(path).parent if Path(path).name == "__init__.py" else Path(path))

        setattr(utils, read.__name__, read_folder)


def _import_deferring(module: str, functions: Mapping[str, tuple[str, str]]) -> None:
    """Import a module while the checks in ``functions`` return False; then restore the checks in all newly imported modules and defer the
    functions."""
    utils = importlib.import_module("transformers.utils")
    checks = {name: getattr(utils, name) for name in functions if hasattr(utils, name)}
    for name in checks:
        setattr(utils, name, _is_unavailable)
    before = set(sys.modules)
    try:
        importlib.import_module(module)
    finally:
        for name, check in checks.items():
            setattr(utils, name, check)
        for made in [sys.modules[key] for key in sys.modules.keys() - before]:
            for name, (source, function) in functions.items():
                if vars(made).get(name) is _is_unavailable:  # which only names in ``checks`` are
                    setattr(made, name, checks[name])
                    vars(made).setdefault(function, _defer(source, function))


def _is_unavailable() -> bool:
    return False


def _defer(source: str, name: str) -> Callable[..., Any]:
    """Return a function that imports its module when it is called."""

    def deferred(*arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(source), name)(*arguments, **options)

    return deferred


class Distributions(Mapping[str, list[str]]):
    """Package -> names of the distributions that contain it, listed on demand.

    Args:
        find: lists all of them, as ``importlib.metadata.packages_distributions``.
    """

    def __init__(self, find: Callable[[], Mapping[str, list[str]]]) -> None:
        self._find = find

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return self._find()

    def __getitem__(self, package: str) -> list[str]:
        if package in NAMED_ALIKE and any(True for _ in importlib.metadata.distributions(name=package)):
            return [package]
        return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
