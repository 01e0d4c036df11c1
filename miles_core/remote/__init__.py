"""Trainer ranks and engines as workers in separate processes, independent of how a runtime reaches them.

``rank`` is a learner with the way its weights leave it, ``learner_front`` the handle that the driver has of all ranks, ``turns`` what the two
sides do where they share devices. ``inline`` is the runtime of one process: the same handle on one rank, which it calls directly. ``worker`` is
what another process does first, ``rank_worker`` and ``engine_worker`` what it holds then. ``workers`` is the one thing
that a runtime has to bring: a call that reaches a process, and a new process for one that died. From it follow the two fronts that the driver
talks to (``learner_front``, ``engine_front``), the order in which everything is built and checked, and what is done when a worker is
lost (``runtime``). Only plain data and bytes cross.
"""
