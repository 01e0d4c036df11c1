"""Weight sync: the precision in force, the push to the engine, and the copy within one process.

A sync has four stages: the trainer yields units (``contracts.trainer``), plugins change the stream (``wrap_weights``), the codec
encodes it (``precision.codec``), and a transport moves the bytes. ``push`` handles weights that do not arrive, ``precision`` the
switch to another precision during a run. Transports between processes build on the package ``miles_transport``.
"""
