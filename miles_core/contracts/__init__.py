"""The interfaces that backends and plugins implement.

Contains the abstract classes of engine, trainer, transport, schedule and runtime, the ``Run`` and ``Policy`` objects passed to
plugins, and ``hooks``, whose docstring shows when the loop calls each hook. This package may import ``config``, ``plugin``
and ``precision``, because its signatures use ``Config``, ``Plan``, ``Format`` and ``Codec``.
"""
