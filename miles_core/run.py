"""A run: the accepted plan, the parts built from it, and the directory it lives in."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_core.checkpoint import Checkpoints, Store
from miles_core.data.field import Field
from miles_core.errors import CheckpointError, ConfigError
from miles_core.observe.metrics import MetricLog
from miles_core.observe.timer import Clock, Profiler
from miles_core.policy import Policy
from miles_core.stash import Stash

if TYPE_CHECKING:
    from miles_core.config.config import Config
    from miles_core.observe.progress import Progress
    from miles_core.plugin.load import Hooks
    from miles_core.plugin.plan import Plan
    from miles_core.rollout.collect import Collector, Group
    from miles_core.rollout.prompt import PromptQueue

log = logging.getLogger(__name__)


class Run:
    """Shared by core and plugins; plugins hang their own state on ``stash``.

    Attributes:
        config, plan, hooks: what was asked for, what was resolved, who is told.
        directory: where everything of this run is written.
        fields: declared columns of the active plugins and of core.
        policies: one by default.
        prompts: the queue of prompts; tokenizer: the checkpoint's.
        step: completed steps; during a step, the number of the step under way.
        stop_requested: the user asked to stop; honoured after the step, or at once during a rollout.
        clock, progress, metrics, profiler: observation.
        stash: typed plugin state.
    """

    def __init__(self, config: Config, plan: Plan, hooks: Hooks, fields: tuple[Field, ...], directory: Path) -> None:
        self.config, self.plan, self.hooks, self.fields, self.directory = config, plan, hooks, fields, directory
        self.stash = Stash()
        self.step = 0
        self.stop_requested = False
        self.clock = Clock()
        self.policies = [Policy(hf_checkpoint=config.model.hf_checkpoint or "")]
        self.checkpoints = Checkpoints(directory / "checkpoints")
        self.profiler = Profiler(config.run.profile_dir or directory / "profile", count=1 if config.run.profile else 0)
        self.metrics: MetricLog
        self.progress: Progress
        self.prompts: PromptQueue
        self.tokenizer: Any = None
        self.runtime: Any = None
        self._committed: dict[str, Any] = {}
        self._saved_step = -1

    @property
    def policy(self) -> Policy:
        """The policy of a run that has one."""
        return self.policies[0]
