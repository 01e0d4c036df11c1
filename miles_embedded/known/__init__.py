"""Examines a model without importing torch or Transformers, if its family and all entries of its ``config.json`` are known, so that a plan
is fast. ``known_weights`` accepts only models that are certain to load: a family of the table, entries with known names and possible
values, and weight files (if there are any) with exactly the tensors and shapes that follow. Everything else is examined by building the model
with Transformers (``model.examine``), which decides; a test compares the table with Transformers' own modules.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from miles_core.plugin.load import announce_import
from miles_embedded.known.entries import Unknown
from miles_embedded.known.weights import Shapes, known_weights


def examine(config: Any, weights: bool) -> None:
    """See ``miles_core.plugin.Plugin.examine``: raise the errors that loading the run's model would raise.

    Without ``weights`` (a plan), a model that ``known_weights`` knows is not built."""
    options = config.model
    flag, path = ("--ref-load", options.ref_load) if options.ref_load else ("--hf-checkpoint", options.hf_checkpoint)
    if path is None or not Path(path).is_dir():
        return
    if not weights and "transformers" not in sys.modules:
        try:
            known_weights(Path(path))
            return
        except Unknown as unknown:
            announce_import("transformers", f"to build the model of {flag} {path} without its weights ({unknown})")
    from miles_embedded.model.examine import examine as build_and_examine

    build_and_examine(config, weights)


def find_known_weights(directory: Path | str) -> Shapes | None:
    """Return checkpoint name -> shape of the weights of a known model; None if only building it can tell."""
    try:
        return known_weights(Path(directory))
    except Unknown:
        return None
