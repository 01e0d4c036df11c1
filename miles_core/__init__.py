"""A plugin-based reinforcement-learning loop for language models.

What authors of plugins need, importable from here: what a manifest declares, what hooks are given, errors, and the pure
functions of the algorithms. ``miles_core.format`` is for number formats, ``miles_core.backend`` for engines, trainers,
transports and runtimes, ``miles_testing`` for tests; ``miles_core.api`` is what programs and notebooks call to train.
No other module is public.

Names are looked up when they are first used, so that a manifest (``Plugin``, ``Rule``, ``option``, ...) imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.lookup import looked_up
from miles_core.version import __version__

if TYPE_CHECKING:
    from miles_core.algorithm.advantage import ADVANTAGES, AdvantageInputs, at_last_token, gae
    from miles_core.algorithm.correction import Correct, Correction, CorrectionInputs, Needs, compose_corrections
    from miles_core.algorithm.policy_loss import Clip, PolicyLossInputs, policy_loss_of
    from miles_core.algorithm.ragged import expand
    from miles_core.algorithm.reduction import loss_weights
    from miles_core.config.config import Config
    from miles_core.contracts.engine import Request
    from miles_core.contracts.policy import Policy
    from miles_core.contracts.run import Run
    from miles_core.contracts.trainer import Context, Loss, Output
    from miles_core.data.batch import Batch, Ragged, collate
    from miles_core.data.field import Field
    from miles_core.data.prompt_source import PromptSource, Row
    from miles_core.data.renderer import CannotExtend, Renderer
    from miles_core.data.sample import Sample, Status
    from miles_core.data.unit import Unit
    from miles_core.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        MilesError,
        MismatchError,
        NonFiniteError,
        PlanError,
        PluginError,
        SyncError,
    )
    from miles_core.plugin.facts import Fact, Facts
    from miles_core.plugin.hint import Hint, Remedy, above, below, fell, jumped, not_finite, oscillates
    from miles_core.plugin.manifest import Capability, Command, Package, Pair, Plugin, Rule, Set
    from miles_core.plugin.marker import hookimpl
    from miles_core.plugin.memory import Parts, Usage
    from miles_core.plugin.number_format import format_plugin
    from miles_core.plugin.options import option
    from miles_core.plugin.panel import Panel
    from miles_core.plugin.problem import Problem, Review, described
    from miles_core.reward.reward import group_reward
    from miles_core.rollout.ask import Ask
    from miles_core.rollout.function import RolloutFunction
    from miles_core.rollout.transcript import Transcript, Turn
    from miles_core.stash import StashKey
    from miles_core.train.micro_batches import MICRO_BATCH_TOKENS, micro_batch_limits


__getattr__, __dir__ = looked_up(
    __name__,
    {
        "miles_core.algorithm.advantage": "ADVANTAGES AdvantageInputs at_last_token gae",
        "miles_core.algorithm.correction": "Correct Correction CorrectionInputs Needs compose_corrections",
        "miles_core.algorithm.policy_loss": "Clip PolicyLossInputs policy_loss_of",
        "miles_core.algorithm.ragged": "expand",
        "miles_core.algorithm.reduction": "loss_weights",
        "miles_core.config.config": "Config",
        "miles_core.contracts.engine": "Request",
        "miles_core.contracts.policy": "Policy",
        "miles_core.contracts.run": "Run",
        "miles_core.contracts.trainer": "Context Loss Output",
        "miles_core.data.batch": "Batch Ragged collate",
        "miles_core.data.field": "Field",
        "miles_core.data.prompt_source": "PromptSource Row",
        "miles_core.data.renderer": "CannotExtend Renderer",
        "miles_core.data.sample": "Sample Status",
        "miles_core.data.unit": "Unit",
        "miles_core.errors": "CheckpointError ConfigError DataError MilesError MismatchError "
        "NonFiniteError PlanError PluginError SyncError",
        "miles_core.plugin.number_format": "format_plugin",
        "miles_core.plugin.facts": "Fact Facts",
        "miles_core.plugin.hint": "Hint Remedy above below fell jumped not_finite oscillates",
        "miles_core.plugin.manifest": "Capability Command Package Pair Plugin Rule Set",
        "miles_core.plugin.marker": "hookimpl",
        "miles_core.plugin.memory": "Parts Usage",
        "miles_core.plugin.options": "option",
        "miles_core.plugin.panel": "Panel",
        "miles_core.plugin.problem": "Problem Review described",
        "miles_core.reward.reward": "group_reward",
        "miles_core.rollout.ask": "Ask",
        "miles_core.rollout.function": "RolloutFunction",
        "miles_core.rollout.transcript": "Transcript Turn",
        "miles_core.stash": "StashKey",
        "miles_core.train.micro_batches": "MICRO_BATCH_TOKENS micro_batch_limits",
    },
)

__all__ = [
    "ADVANTAGES",
    "MICRO_BATCH_TOKENS",
    "AdvantageInputs",
    "Ask",
    "Batch",
    "CannotExtend",
    "Capability",
    "CheckpointError",
    "Clip",
    "Command",
    "Config",
    "ConfigError",
    "Context",
    "Correct",
    "Correction",
    "CorrectionInputs",
    "DataError",
    "Fact",
    "Facts",
    "Field",
    "Hint",
    "Loss",
    "MilesError",
    "MismatchError",
    "Needs",
    "NonFiniteError",
    "Output",
    "Package",
    "Pair",
    "Panel",
    "Parts",
    "PlanError",
    "Plugin",
    "PluginError",
    "Policy",
    "PolicyLossInputs",
    "Problem",
    "PromptSource",
    "Ragged",
    "Remedy",
    "Renderer",
    "Request",
    "Review",
    "RolloutFunction",
    "Row",
    "Rule",
    "Run",
    "Sample",
    "Set",
    "StashKey",
    "Status",
    "SyncError",
    "Transcript",
    "Turn",
    "Unit",
    "Usage",
    "__version__",
    "above",
    "at_last_token",
    "below",
    "collate",
    "compose_corrections",
    "described",
    "expand",
    "fell",
    "format_plugin",
    "gae",
    "group_reward",
    "hookimpl",
    "jumped",
    "loss_weights",
    "micro_batch_limits",
    "not_finite",
    "option",
    "oscillates",
    "policy_loss_of",
]
