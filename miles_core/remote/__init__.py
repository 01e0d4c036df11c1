"""Trainer ranks and engines in processes of their own, however a runtime reaches them.

``worker`` is what such a process does first, ``rank_worker`` and ``engine_worker`` what it holds then. ``workers`` is the one thing
that a runtime has to bring: a call that reaches a process, and a new process for one that died. From it follow the two fronts that the driver
talks to (``learner_front``, ``engine_front``), the order in which everything is built and checked, and what is done when a worker is
lost (``runtime``). Only plain data and bytes cross.
"""
