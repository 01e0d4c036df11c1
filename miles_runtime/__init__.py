"""The learner of a policy and its ranks, and engines in processes of their own, however a runtime reaches them.

``rank`` is a learner with the way its weights leave it, ``learner_front`` the handle that the driver has of all ranks, ``turns`` what the two
sides do where they share devices. ``inline`` is the runtime of one process: the same handle on one rank, which it calls directly. ``worker`` is
what another process does first, ``rank_worker`` and ``engine_worker`` what it holds then. ``workers`` is the one thing
that a runtime has to bring: a call that reaches a process, and a new process for one that died. From it follow the two fronts that the driver
talks to (``learner_front``, ``engine_front``), the order in which everything is built and checked, and what is done when a worker is
lost (``runtime``). Only plain data and bytes cross.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import looked_up

if TYPE_CHECKING:
    from miles_runtime.engine_worker import EngineWorker
    from miles_runtime.inline import InlineRuntime
    from miles_runtime.output import last_lines, write_there
    from miles_runtime.rank_worker import RankWorker
    from miles_runtime.runtime import RemoteRuntime
    from miles_runtime.worker import Order, Worker
    from miles_runtime.workers import Restarts, Workers, short_of_memory

__all__ = [
    "EngineWorker",
    "InlineRuntime",
    "Order",
    "RankWorker",
    "RemoteRuntime",
    "Restarts",
    "Worker",
    "Workers",
    "last_lines",
    "short_of_memory",
    "write_there",
]

__getattr__, __dir__ = looked_up(
    __name__,
    {
        "miles_runtime.engine_worker": "EngineWorker",
        "miles_runtime.inline": "InlineRuntime",
        "miles_runtime.output": "last_lines write_there",
        "miles_runtime.rank_worker": "RankWorker",
        "miles_runtime.runtime": "RemoteRuntime",
        "miles_runtime.worker": "Order Worker",
        "miles_runtime.workers": "Restarts Workers short_of_memory",
    },
)
