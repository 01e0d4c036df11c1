"""The decoder from a run's configuration."""

from __future__ import annotations

from typing import Any

from miles_speculative.decoder import SpeculativeDecoder
from miles_speculative.head import head_of
from miles_speculative.lookahead import Fixed


def make_decoder(run: Any, policy: Any, engine: Any) -> SpeculativeDecoder:
    """The provider of the decoder named ``speculative``."""
    options = run.config.plugin("speculative")
    return SpeculativeDecoder(
        head_of(engine.model), Fixed(3 if options.lookahead == "auto" else int(options.lookahead))
    )
