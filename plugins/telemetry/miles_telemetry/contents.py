"""What services store of a run besides its metrics: parameters and rows of samples, without credentials."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from miles_core.plugin import redact

if TYPE_CHECKING:
    from miles_core.data import Sample
    from miles_core.plugin import Run

#: Longest prompt or response in a row, in characters.
LONGEST = 4000


def list_parameters(run: Run) -> dict[str, str]:
    """Return the options of a run as texts, by name."""
    return {name: redact(f"{name}={value}").partition("=")[2] for name, value in vars(run.config.args).items()}


def make_rows(samples: Iterable[tuple[Sample, Any, str]], count: int) -> dict[str, list[dict[str, Any]]]:
    """Return name of the evaluation set ("" in training) -> rows of its first ``count`` samples.

    Args:
        samples: as in ``SampleSink.write_samples``: sample, recorded values, name of the evaluation set.
        count: rows per set.
    """
    sets: dict[str, list[dict[str, Any]]] = {}
    for name, group in itertools.groupby(samples, key=lambda each: each[2]):
        rows = sets.setdefault(name, [])
        for sample, _, _ in itertools.islice(group, count - len(rows)):
            texts = {key: redact(str(getattr(sample, key)))[:LONGEST] for key in ("prompt", "response", "label")}
            rows.append({**texts, "reward": str(sample.reward), "tokens": sample.response_length})
    return sets
