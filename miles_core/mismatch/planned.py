"""The lines of a plan about the check of the first step (``first_steps``): the largest mean difference of engine and trainer.

A plan does not import number formats, which need torch; their manifests repeat how much they round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from miles_core.mismatch.tolerance import Side, find_dtype, first_step_bound
from miles_core.plugin.conflicts import BASE
from miles_core.plugin.rule import Truth, evaluate

if TYPE_CHECKING:
    from miles_core.plugin.facts import Facts
    from miles_core.plugin.manifest import Plugin


def describe_bounds(facts: Facts, manifests: Mapping[str, Plugin]) -> Iterator[str]:
    """Yield one line for each pair of precisions of a policy that generates and learns; none with ``--no-self-check``.

    Args:
        facts: facts of a policy in an accepted plan.
        manifests: the installed plugins.
    """
    if not facts.value("model.self_check"):
        return
    pairs = [(facts.value("rollout.precision"), facts.value("train.precision"))]
    if facts.value("precision.warmup_steps"):
        pairs.insert(0, (BASE, BASE))
    then = "that is a warning" if facts.value("allow_mismatch") else "the run stops (--allow-mismatch trains anyway)"
    for rollout, train in pairs:
        cache = str(facts.value("rollout.kv_cache_dtype") or "auto")
        engine = _find_side(rollout, "" if cache == "auto" else cache, facts, manifests)
        trainer = _find_side(train, "", facts, manifests)
        if engine is None or trainer is None:
            yield f"first step: the log shows how far engine and trainer may differ; the manifest of {rollout} declares no error"
        else:
            bound = first_step_bound(engine, trainer)
            sides = f"engine ({engine}) and trainer ({trainer})"
            yield f"first step: if {sides} differ by more than {bound:.2g} nats per token on average, {then}"


def _find_side(precision: str, cache: str, facts: Facts, manifests: Mapping[str, Plugin]) -> Side | None:
    """Return the declared precision of a side; None if the manifest of its number format does not declare it."""
    dtype = find_dtype(facts.value)
    if precision == BASE:
        return Side(dtype, cache=cache)
    plugin = next(plugin for plugin in manifests.values() if precision in plugin.formats)
    errors = (error for when, error in plugin.format_error.items() if evaluate(when, facts.lookup) is Truth.TRUE)
    error = next(errors, None)
    return None if error is None else Side(dtype, precision, error, plugin.rounds_inputs, cache)
