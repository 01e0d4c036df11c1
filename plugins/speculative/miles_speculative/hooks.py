"""Where speculative plugs in, whatever the backends: what the engine reports becomes metrics, and a table at the end."""

from __future__ import annotations

import logging
from typing import Any

from miles_core import hookimpl
from miles_speculative.config import SpeculativeConfig
from miles_speculative.draft_model import check_draft
from miles_speculative.report import Profile, summarise

log = logging.getLogger(__name__)


class Speculative:
    """The metrics of drafting."""

    def __init__(self, options: SpeculativeConfig) -> None:
        self.options = options
        self.profile = Profile() if options.profile else None

    @hookimpl
    def on_start(self, run: Any) -> None:
        path = self.options.draft_model_path
        for policy in run.policies if path is not None else ():
            check_draft(path, policy.hf_checkpoint or run.config.model.hf_checkpoint, run.tokenizer)

    @hookimpl
    def on_step(self, metrics: dict[str, float]) -> None:
        if self.profile is not None:
            self.profile.add(metrics)
        summarise(metrics)

    @hookimpl
    def on_stop(self) -> None:
        if self.profile is not None:
            for line in self.profile.lines():
                log.warning("%s", line)
