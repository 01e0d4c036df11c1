"""The plugin host: manifests, facts, rules, plans and hook registration.

A manifest declares as data what a plugin provides, requires and excludes. The checker compares every manifest with the facts
of host, model and options. The resulting plan lists the plugins of a run, and ``load`` imports and registers their hook
classes. ``contracts.hooks`` documents the hooks. The decorator ``hookimpl`` is defined here, in ``marker``, so that plugin
modules can import it without further dependencies. Does not import torch.

It exports what every plugin needs: the classes of a manifest, the types that hooks receive, the errors, and the types of parts that
are neither engine nor trainer. Names are imported on first use, so that importing a manifest does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_core.checkpoint.store import Store as Store
    from miles_core.config.config import Config as Config
    from miles_core.contracts.run import Policy as Policy
    from miles_core.contracts.run import Run as Run
    from miles_core.contracts.runtime import PolicyParts as PolicyParts, Runtime as Runtime
    from miles_core.contracts.schedule import Position as Position, Schedule as Schedule
    from miles_core.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        DataError as DataError,
        MilesError as MilesError,
        MismatchError as MismatchError,
        NonFiniteError as NonFiniteError,
        OutOfTime as OutOfTime,
        PlanError as PlanError,
        PluginError as PluginError,
        SyncError as SyncError,
        WorkerLost as WorkerLost,
    )
    from miles_core.plugin.detect import (
        config_facts as config_facts,
        model_facts as model_facts,
    )
    from miles_core.plugin.facts import Fact as Fact, Facts as Facts
    from miles_core.plugin.hint import (
        Hint as Hint,
        Remedy as Remedy,
        above as above,
        below as below,
    )
    from miles_core.plugin.layers import (
        NO_MIXER as NO_MIXER,
        STATE_KINDS as STATE_KINDS,
        layer_kinds as layer_kinds,
        moe_layers as moe_layers,
    )
    from miles_core.plugin.manifest import (
        Capability as Capability,
        Command as Command,
        Package as Package,
        Pair as Pair,
        Plugin as Plugin,
        Rule as Rule,
        Set as Set,
    )
    from miles_core.plugin.marker import hookimpl as hookimpl
    from miles_core.plugin.memory import Parts as Parts, Usage as Usage
    from miles_core.plugin.options import option as option
    from miles_core.plugin.panel import Panel as Panel
    from miles_core.plugin.problem import Problem as Problem, Review as Review, describe_fact as describe_fact
    from miles_core.redact import redact as redact
    from miles_core.reward.reward import compares_label as compares_label, group_reward as group_reward
    from miles_core.rollout.function import GenerationClient as GenerationClient
    from miles_core.rollout.function import RolloutFunction as RolloutFunction
    from miles_core.rollout.transcript import Transcript as Transcript, Turn as Turn
    from miles_core.run.inline import InlineRuntime as InlineRuntime
    from miles_core.schedule.sync import SyncSchedule as SyncSchedule
    from miles_core.contracts.run import StateKey as StateKey

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_core.checkpoint.store": "Store",
        "miles_core.config.config": "Config",
        "miles_core.contracts.run": "Policy Run StateKey",
        "miles_core.contracts.runtime": "PolicyParts Runtime",
        "miles_core.contracts.schedule": "Position Schedule",
        "miles_core.errors": "CheckpointError ConfigError DataError MilesError MismatchError NonFiniteError OutOfTime PlanError "
        "PluginError SyncError WorkerLost",
        "miles_core.plugin.detect": "config_facts model_facts",
        "miles_core.plugin.facts": "Fact Facts",
        "miles_core.plugin.hint": "Hint Remedy above below",
        "miles_core.plugin.layers": "NO_MIXER STATE_KINDS layer_kinds moe_layers",
        "miles_core.plugin.manifest": "Capability Command Package Pair Plugin Rule Set",
        "miles_core.plugin.marker": "hookimpl",
        "miles_core.plugin.memory": "Parts Usage",
        "miles_core.plugin.options": "option",
        "miles_core.plugin.panel": "Panel",
        "miles_core.plugin.problem": "Problem Review describe_fact",
        "miles_core.redact": "redact",
        "miles_core.reward.reward": "compares_label group_reward",
        "miles_core.rollout.function": "GenerationClient RolloutFunction",
        "miles_core.rollout.transcript": "Transcript Turn",
        "miles_core.run.inline": "InlineRuntime",
        "miles_core.schedule.sync": "SyncSchedule",
    },
)
__all__ = __dir__()
