"""The plugin that provides a simulated run's parts. ``miles simulate`` activates it by the path of this file, so that no plan of a real run
can select it."""

from __future__ import annotations

from miles_core import __version__
from miles_core.plugin import Plugin
from miles_planner.simulation.options import SimulationConfig
from miles_planner.simulation.setup import NAME

_HERE = "miles_planner.simulation.providers"

plugin = Plugin(
    name=NAME,
    summary="virtual engines and a virtual trainer",
    version=__version__,
    core=f"=={__version__}",
    config=SimulationConfig,
    provides={
        "runtime": {NAME: f"{_HERE}:make_runtime"},
        "prompts": {NAME: f"{_HERE}:EndlessPrompts"},
        "reward": {NAME: f"{_HERE}:make_reward"},
    },
    capabilities={"runtime": ("remote",)},
)
