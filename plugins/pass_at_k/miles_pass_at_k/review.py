"""Plan checks: every k needs as many samples of a prompt, and the best checkpoint is one that is saved."""

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
    if facts.value("pass_at_k.keep_best"):
        every, saved = (facts.value(name) for name in ("evaluation.interval", "save_interval"))
        if every is None or saved is None or every % saved:
            problems.append(
                Problem(
                    "pass_at_k",
                    "a checkpoint of every step that is evaluated",
                    "--keep-best keeps one of them: give --eval-interval N and a --save-interval that divides it",
                    tuple(describe_fact(facts.lookup(each)) for each in ("evaluation.interval", "save_interval")),
                    choices=("evaluation.interval", "save_interval"),
                )
            )
    return Review(problems=tuple(problems))
