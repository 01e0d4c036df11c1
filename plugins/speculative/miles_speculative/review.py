"""What the plan says of a run with drafts before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_core import Facts, Problem, Review, described
from miles_speculative.draft_files import has_windows, misfits, read_config


def review(facts: Facts, model: Mapping[str, Any] | None) -> Review:
    """See ``miles_core.Plugin.review``: a draft of its own that does not fit the policy, and trees where layers have windows."""
    path, checkpoint = facts.value("speculative.draft_model_path"), facts.value("model.hf_checkpoint")
    found = []
    if path and model is not None and checkpoint and Path(checkpoint).is_dir():
        values = (described(facts.lookup("speculative.draft_model_path")),)
        whys = misfits(path, checkpoint, facts.value("model.trust_remote_code", False))
        found += [Problem("speculative", "a draft of this policy", why, values) for why in whys]
    width = facts.value("speculative.topk", 1)
    if width > 1 and facts.value("engine") == "embedded":
        windows = [has_windows(config) for config in (model, path and read_config(path)) if config]
        if any(windows):
            values = (described(facts.lookup("speculative.topk")),)
            why = "layers with a sliding window cannot tell the branches of a tree apart; draft a chain (--spec-topk 1)"
            found.append(
                Problem("speculative", "layers that see all tokens", why, values, choices=("speculative.topk",))
            )
    return Review(problems=tuple(found))
