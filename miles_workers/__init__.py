"""Trainer ranks, engines and rollouts as workers in separate processes, independent of how a runtime reaches them.

``inline`` is the runtime of one process, where the driver calls the learner directly (``miles_core.train.local_learner``). ``worker`` is the
entry point of another process, which then holds a ``rank_worker``, an ``engine_worker`` or a ``rollout_worker``. A runtime implements only
``workers``: calls to a process, and the replacement of a dead process; ``local_workers`` does it on one machine. The package adds the
driver's handles (``learner_group``, ``engine_pool``, ``rollout_pool``), the order of building and checking parts, and the recovery of
lost workers (``runtime``). Only plain data and bytes are sent between processes, weights in blocks
(``weight_block``) unless a plugin has another transport. Rollout workers send requests straight to engines
(``direct_engines``) and read prompts from files (``prompt_rows``), and their samples stay where they were produced until a rank reads them
(``object_ref``, ``remote_sample``, ``sample_list``), or the process that saves them (``object_reader``). Attributes of samples travel once per group
(``packed_column``). What training recorded for each token stays with the rank (``remote_tokens``). An engine on top of another program is a
``program_engine``.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_workers.engine_worker import EngineWorker
    from miles_workers.inflight import next_number
    from miles_workers.local_process import LocalProcess, ProcessEnded, process_state, uses_cpu
    from miles_workers.object_reader import ObjectReader, ReaderEnded, load_function, make_answer
    from miles_workers.object_ref import ObjectRef, Stored
    from miles_workers.output import last_lines, worker_name, write_there
    from miles_workers.program_choices import ProgramChoices, choices_of_run, policies_sharing
    from miles_workers.program_engine import ProgramEngine
    from miles_workers.rank_worker import RankWorker
    from miles_workers.renewal import EngineLost
    from miles_workers.restarts import Restarts
    from miles_workers.rollout_worker import RolloutWorker
    from miles_workers.runtime import RemoteRuntime
    from miles_workers.served_model import ROUTED_EXPERTS, Routing, language_config
    from miles_workers.worker import Worker, WorkerSpec
    from miles_workers.workers import Workers, short_of_memory

__all__ = [
    "ROUTED_EXPERTS",
    "EngineLost",
    "EngineWorker",
    "LocalProcess",
    "ObjectReader",
    "ObjectRef",
    "ProcessEnded",
    "ProgramChoices",
    "ProgramEngine",
    "RankWorker",
    "ReaderEnded",
    "RemoteRuntime",
    "Restarts",
    "RolloutWorker",
    "Routing",
    "Stored",
    "Worker",
    "WorkerSpec",
    "Workers",
    "choices_of_run",
    "language_config",
    "last_lines",
    "load_function",
    "make_answer",
    "next_number",
    "policies_sharing",
    "process_state",
    "short_of_memory",
    "uses_cpu",
    "worker_name",
    "write_there",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_workers.object_ref": "ObjectRef Stored",
        "miles_workers.object_reader": "ObjectReader ReaderEnded load_function make_answer",
        "miles_workers.engine_worker": "EngineWorker",
        "miles_workers.local_process": "LocalProcess ProcessEnded process_state uses_cpu",
        "miles_workers.output": "last_lines worker_name write_there",
        "miles_workers.rank_worker": "RankWorker",
        "miles_workers.rollout_worker": "RolloutWorker",
        "miles_workers.runtime": "RemoteRuntime",
        "miles_workers.served_model": "ROUTED_EXPERTS Routing language_config",
        "miles_workers.worker": "WorkerSpec Worker",
        "miles_workers.inflight": "next_number",
        "miles_workers.program_choices": "ProgramChoices choices_of_run policies_sharing",
        "miles_workers.program_engine": "ProgramEngine",
        "miles_workers.renewal": "EngineLost",
        "miles_workers.restarts": "Restarts",
        "miles_workers.workers": "Workers short_of_memory",
    },
)
