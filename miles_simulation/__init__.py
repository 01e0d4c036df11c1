"""``miles simulate``: one run as a discrete-event simulation, with core's loop, schedules, collector and engine pool on a virtual clock.

Only the engines, the trainer and the transfer of weights are models: they take as long as ``speed`` says. Everything that decides
what waits for what is the code of a real run.
"""

from miles_core import __version__
from miles_core.plugin import Command, Plugin

plugin = Plugin(
    name="simulation",
    summary="simulate a run's schedule on many GPUs, shipped with miles-core",
    version=__version__,
    core=f"=={__version__}",
    commands={
        "simulate": Command(
            "simulate utilization, tokens per second and staleness of a run", "miles_simulation.command:run"
        )
    },
    standard=True,
)
