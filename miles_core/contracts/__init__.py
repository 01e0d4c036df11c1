"""What others implement: engine, trainer, runtime, hooks.

The abstract classes of engine, trainer, transport and runtime; the run and the policy as plugins see them; and ``hooks``,
whose docstring is the map of the loop. Stands above ``config``, ``plugin`` and ``precision`` because its signatures name
``Config``, ``Plan``, ``Format`` and ``Codec``.
"""
