"""Plan checks of runs with drafts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_core.plugin import Facts, Problem, Review, describe_fact
from miles_speculative.draft_files import has_windows, misfits, read_config


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """Implements ``miles_core.plugin.Plugin.review``.

    Reports a draft that does not fit the policy, tree drafts with sliding-window layers, and a wrong number of tokens to verify."""
    here = facts.value("engine") == "embedded"
    drafts = _fact_in_use(facts, "speculative.draft_model_path", "speculative.sglang_draft")
    path, checkpoint = facts.value(drafts), facts.value("model.hf_checkpoint")
    found = []
    if path and model is not None and checkpoint and Path(checkpoint).is_dir():
        values = (describe_fact(facts.lookup(drafts)),)
        whys = misfits(path, checkpoint, facts.value("model.trust_remote_code", False))
        found += [Problem("speculative", "a draft of this policy", why, values) for why in whys]
    widths = _fact_in_use(facts, "speculative.topk", "speculative.eagle_topk")
    if here and facts.value(widths, 1) > 1:
        windows = [has_windows(config) for config in (model, path and read_config(path)) if config]
        if any(windows):
            values = (describe_fact(facts.lookup(widths)),)
            why = "sliding-window layers do not support tree drafts; draft a chain (--spec-topk 1)"
            found.append(Problem("speculative", "layers with full attention", why, values, choices=(widths,)))
    if here and (verified := facts.value("speculative.num_draft_tokens")):
        found += _check_verified_count(facts, int(verified), int(facts.value(widths, 1)))
    return Review(problems=tuple(found))


def _fact_in_use(facts: Facts, own: str, other: str) -> str:
    """Return the name of the fact in use: that of SGLang's flag if it has a value, else this plugin's own."""
    return other if other and facts.value(other) else own


def _check_verified_count(facts: Facts, verified: int, width: int) -> Iterator[Problem]:
    """Report a wrong number of tokens to verify. SGLang's "draft tokens" include the token before the drafts."""
    depths = _fact_in_use(facts, "speculative.lookahead", "speculative.num_steps")
    depth, name = facts.value(depths), "speculative.num_draft_tokens"
    if depth == "auto" or verified != 1 + int(depth) * width:
        many = "as many as --spec-lookahead auto chooses" if depth == "auto" else f"1 + {depth} x {width}"
        why = f"the embedded engine verifies every draft, {many}; leave --sglang-speculative-num-draft-tokens out"
        values = tuple(describe_fact(facts.lookup(fact)) for fact in (name, depths))
        yield Problem("speculative", "as many tokens to verify as are drafted", why, values, choices=(name,))
