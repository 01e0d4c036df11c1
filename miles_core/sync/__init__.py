"""Weight sync: the current precision, the push to the engine, and the transport within one process.

A sync has four stages: the trainer yields units (``contracts.trainer``), plugins change the stream (``wrap_weights``), the codec
encodes it (``precision.codec``), and a transport sends the bytes. ``push`` also handles failed pushes and
the switch to another precision during a run. Transports between processes use the package ``miles_workers.transport``.
"""
