"""Recorded steps: what a run keeps of each step so that ``miles replay`` can repeat it and ``miles diff`` can compare it, and runs of one
half of the loop. This module is the plugin's manifest; it does not import torch.

``steps`` reads and writes ``RUN/steps``, ``sums`` records checksums of gradients and weights, ``recorder`` the samples, ``stored`` trains
on recorded samples. ``stored_run`` reads all that a run stored, ``compare`` finds where two runs part, ``again`` repeats a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles_core.plugin.manifest import Plugin, Rule, Set
from miles_core.plugin.options import option
from miles_core.version import __version__

#: Name of this plugin, and of the schedule that takes the samples of recorded steps.
OWN, STORED = "replay", "stored"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Recorded steps, and runs of one half of the loop on the data of the other."""

    record_steps: bool = option(
        False,
        flag="--record-steps",
        help="keep all that each step trains on, and checksums of its gradients and weights, for miles replay and miles diff",
        enables=True,
    )
    debug_rollout_only: bool = option(
        False,
        flag="--debug-rollout-only",
        help="generate and record the samples of each step; do not train",
        enables=True,
    )
    debug_train_only: bool = option(
        False,
        flag="--debug-train-only",
        help="train on the recorded steps of another run (--load-debug-rollout-data) without an engine",
        enables=True,
    )
    load_debug_rollout_data: Path | None = option(
        None,
        flag="--load-debug-rollout-data",
        help="directory of a run with recorded steps, whose samples are trained on",
        metavar="RUN",
        only_if="replay.debug_train_only",
    )
    debug_last_step: int | None = option(
        None,
        flag="--debug-last-step",
        help="stop after this step (default: the last recorded one)",
        metavar="N",
        ge=1,
        only_if="replay.debug_train_only",
    )


_BECAUSE = "without an engine, samples come from recorded steps"

plugin = Plugin(
    name=OWN,
    summary="recorded steps that can be repeated and compared; runs of one half of the loop; shipped with miles-core",
    version=__version__,
    core=f"=={__version__}",
    config=Replay,
    hooks={
        "replay.record_steps": "miles_tools.replay.sums:Sums",
        "replay.debug_rollout_only": "miles_tools.replay.stored:RolloutOnly",
        "replay.debug_train_only": "miles_tools.replay.stored:TrainOnly",
    },
    provides={
        "schedule": {STORED: "miles_tools.replay.stored:StoredSchedule"},
        "check": {"engine_sums": "miles_tools.replay.sums:make_check"},
    },
    sets={
        "schedule": Set(STORED, when="replay.debug_train_only", because=_BECAUSE),
        "replay.record_steps": Set(
            True, when="replay.debug_rollout_only", because="its samples are for --load-debug-rollout-data"
        ),
    },
    requires=(
        Rule(
            needs="save_rollouts",
            when="replay.record_steps",
            because="training keeps the log-probabilities and advantages that are recorded only for --save-rollouts",
        ),
        Rule(
            needs="replay.load_debug_rollout_data",
            when="replay.debug_train_only",
            because="training without rollouts needs a run with recorded steps (--record-steps): give --load-debug-rollout-data RUN",
        ),
        Rule(
            needs="not replay.debug_rollout_only",
            when="replay.debug_train_only",
            because="one of the two halves has to run",
        ),
        Rule(needs="replay.debug_train_only", when=f"schedule == {STORED}", because=_BECAUSE),
        Rule(needs="not evaluation.interval", when="replay.debug_train_only", because="evaluation needs an engine"),
        Rule(
            needs="precision.warmup_steps == 0",
            when="replay.debug_train_only",
            because="the precision is switched at a weight sync, and there is none without an engine",
        ),
    ),
)
