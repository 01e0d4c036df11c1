"""Plans and simulates runs for hardware that is not available locally: layouts and seconds per step, and runs on a virtual clock.

Backends describe the layouts that they support, and their memory, through the entry points ``miles.planning`` (``layout``). This package
estimates how long each phase of a step takes (``rollout_time``, ``training_time``, ``step_time``), from the peak rates of the GPUs and from
measured efficiencies (``rates.toml``), and proposes the fastest layouts that the plan accepts (``search``). ``simulation`` runs core's loop,
schedules and collector with virtual engines. ``launch`` writes files that start a run on a cluster.

Backends import ``TrainerLayout`` and ``EngineLayout`` from here.
"""

from miles_core.plugin import Command, Plugin
from miles_planner.layout import EngineLayout, TrainerLayout

__all__ = ["EngineLayout", "TrainerLayout", "plugin"]

__version__ = "0.1.0"

plugin = Plugin(
    name="planner",
    summary="the fastest layouts for given hardware, and simulated runs",
    version=__version__,
    core="~=0.1",
    commands={
        "simulate": Command(
            "simulate utilization, tokens per second and staleness of a run", "miles_planner.simulation.command:run"
        ),
        "launch": Command(
            "write a Slurm script that starts a run",
            "miles_planner.launch.command:run",
        ),
    },
    provides={"search": {"layouts": "miles_planner.commands:search_layouts"}},
)
