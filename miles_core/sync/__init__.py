"""Weight sync: the precision in force, and the copy.

A sync has four stages in four places: the trainer yields units (``contracts.trainer``), plugins change the stream
(``wrap_weights``), the codec encodes it (``precision.codec``), and a transport moves the bytes. The transport within one
process is here (``copy``), the buckets that others send (``bucket``) and engines take (``arrivals``, ``inbox``) from memory of a
GPU (``device_memory``), a process group (``broadcast``) or a message (``delta``), how they are held against what was sent
(``checksum``), what happens when weights do not arrive (``push``), and the switch to another precision while a run goes on
(``precision``).
"""
