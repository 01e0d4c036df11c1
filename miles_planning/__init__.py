"""Planning for hardware that is elsewhere: layouts, seconds per step (``miles plan --search``) and files that start a run (``miles launch``).

Backends describe the layouts that they support, and their memory, through the entry points ``miles.planning`` (``layout``). This package
estimates how long each phase of a step takes (``rollout_time``, ``training_time``, ``step_time``), from the peak rates of the GPUs and from
measured efficiencies (``rates.toml``), and proposes the fastest layouts that the plan accepts (``search``). ``launch`` writes the files.

Backends import ``TrainerLayout`` and ``EngineLayout`` from here.
"""

from miles_planning.layout import EngineLayout, TrainerLayout

__all__ = ["EngineLayout", "TrainerLayout"]
