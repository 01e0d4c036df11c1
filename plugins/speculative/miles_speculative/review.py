"""What the plan says of a run with drafts before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles_core.plugin import Facts, Problem, Review, described
from miles_speculative.draft_files import has_windows, misfits, read_config


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """See ``miles_core.plugin.Plugin.review``: a draft of its own that does not fit the policy, trees where layers have windows, and a number of
    tokens to verify that is not that of the drafts."""
    here = facts.value("engine") == "embedded"
    drafts = _said(facts, "speculative.draft_model_path", "speculative.sglang_draft" if here else "")
    path, checkpoint = facts.value(drafts), facts.value("model.hf_checkpoint")
    found = []
    if path and model is not None and checkpoint and Path(checkpoint).is_dir():
        values = (described(facts.lookup(drafts)),)
        whys = misfits(path, checkpoint, facts.value("model.trust_remote_code", False))
        found += [Problem("speculative", "a draft of this policy", why, values) for why in whys]
    widths = _said(facts, "speculative.topk", "speculative.eagle_topk")
    if here and facts.value(widths, 1) > 1:
        windows = [has_windows(config) for config in (model, path and read_config(path)) if config]
        if any(windows):
            values = (described(facts.lookup(widths)),)
            why = "layers with a sliding window cannot tell the branches of a tree apart; draft a chain (--spec-topk 1)"
            found.append(Problem("speculative", "layers that see all tokens", why, values, choices=(widths,)))
    if here and (verified := facts.value("speculative.num_draft_tokens")):
        found += _miscounted(facts, int(verified), int(facts.value(widths, 1)))
    return Review(problems=tuple(found))


def _said(facts: Facts, own: str, other: str) -> str:
    """The name of the fact that says it: this plugin's own one, or that of SGLang's flag where it is given."""
    return other if other and facts.value(other) else own


def _miscounted(facts: Facts, verified: int, width: int) -> Iterator[Problem]:
    """What SGLang calls draft tokens are the token before the drafts and the drafts, which the embedded engine verifies all."""
    depths = _said(facts, "speculative.lookahead", "speculative.num_steps")
    depth, name = facts.value(depths), "speculative.num_draft_tokens"
    if depth == "auto" or verified != 1 + int(depth) * width:
        many = "as many as --spec-lookahead auto chooses" if depth == "auto" else f"1 + {depth} x {width}"
        why = f"the embedded engine verifies every draft, {many}; leave --sglang-speculative-num-draft-tokens out"
        values = tuple(described(facts.lookup(fact)) for fact in (name, depths))
        yield Problem("speculative", "as many tokens to verify as are drafted", why, values, choices=(name,))
