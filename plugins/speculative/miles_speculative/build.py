"""Builds the decoder from a run's configuration."""

from __future__ import annotations

import logging
from typing import Any

from miles_core.plugin import ConfigError
from miles_embedded import StepEngine, has_windows
from miles_speculative.async_rounds import use_rounds
from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.draft import Draft
from miles_speculative.draft_model import draft_on
from miles_speculative.head import head_of
from miles_speculative.lookahead import Auto, Lookahead
from miles_speculative.tree import TreeDecoder

log = logging.getLogger(__name__)

#: With --profile-speculative, one in this many steps runs without drafts, for comparison.
_PLAIN = 64


def make_decoder(run: Any, policy: Any, engine: StepEngine) -> SpeculativeDecoder:
    """Provider of the decoder ``speculative``."""
    options = run.config.plugin("speculative").on("embedded")
    if options.lookahead == "auto":
        lookahead: Lookahead = Auto()
    else:
        lookahead = Lookahead(int(options.lookahead), _PLAIN if options.profile else 0)
    draft: Draft = draft_on(engine.model) if options.draft_model_path else head_of(engine.model)
    if engine.async_steps.used and (options.topk > 1 or options.profile):
        log.warning(
            "drafts make the embedded engine slower on a GPU: its steps with drafts decode without CUDA graphs, because %s",
            "--spec-topk drafts trees" if options.topk > 1 else "--profile-speculative measures the parts of a step",
        )
    if options.topk == 1:
        decoder = SpeculativeDecoder(draft, lookahead, options.profile)
        if engine.async_steps.used and not options.profile:
            use_rounds(engine, decoder, used=True)
        return decoder
    if any(map(has_windows, (engine.model, getattr(engine.model, "draft", engine.model)))):
        raise ConfigError(  # the plan checks only the run's own checkpoint; a policy may have another
            f"--spec-topk {options.topk}: {type(engine.model).__name__} or its draft has sliding-window layers, which do not support tree "
            "drafts; draft a chain (--spec-topk 1)"
        )
    return TreeDecoder(draft, lookahead, options.topk, options.profile)
