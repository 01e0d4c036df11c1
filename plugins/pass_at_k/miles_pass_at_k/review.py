"""Plan check: every k needs as many samples of a prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact

_SAMPLES = "evaluation.n_samples"


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Implements ``miles_core.plugin.Plugin.review``."""
    problems = []
    for name in ("pass_at_k.pass_at", "pass_at_k.majority_at"):
        most = max((int(k) for k in re.findall(r"\d+", str(facts.value(name)))), default=0)
        if most > facts.value(_SAMPLES, 1):
            problems.append(
                Problem(
                    "pass_at_k",
                    f"{_SAMPLES} >= {most}",
                    f"k = {most} samples of a prompt are chosen from those that were generated (--n-samples-per-eval-prompt)",
                    tuple(describe_fact(facts.lookup(each)) for each in (name, _SAMPLES)),
                    choices=(_SAMPLES,),
                )
            )
    return Review(problems=tuple(problems))
