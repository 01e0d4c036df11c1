"""Hooks for all backends: convert the engine's reports to metrics and a final table, and request training of the MTP layer."""

from __future__ import annotations

import logging
from typing import Any

from miles_core.plugin import CheckpointError, hookimpl
from miles_core.trainer import MtpRequest
from miles_speculative.config import GROUP, MTP, SpeculativeConfig
from miles_speculative.draft_files import misfits
from miles_speculative.report import Profile, summarise

log = logging.getLogger(__name__)


class Speculative:
    """Reports the metrics of drafting."""

    def __init__(self, options: SpeculativeConfig) -> None:
        self.options = options
        self.profile = Profile() if options.profile else None

    @hookimpl
    def on_start(self, run: Any) -> None:
        path = self.options.on(run.config.run.engine).draft_model_path
        trust = run.config.model.trust_remote_code
        if path is None:
            return
        for policy in run.policies:
            # the plan has checked only the run's own checkpoint
            for why in misfits(path, policy.hf_checkpoint, trust) if policy.hf_checkpoint else ():
                raise CheckpointError(why)

    @hookimpl
    def on_mtp_layers(self, requests: list[MtpRequest]) -> None:
        if self.options.mtp_training:
            requests.append(MtpRequest(MTP, GROUP, self.options.mtp_loss_scaling_factor, self.options.draft_lr))

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
