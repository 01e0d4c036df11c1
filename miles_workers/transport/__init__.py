"""Transfer of encoded weights between processes: buckets, checksums and transports.

Senders pack encoded tensors into buckets (``bucket``) and compute checksums (``checksum``). A bucket is transferred through GPU memory
(``device_memory``), through a process group (``broadcast``), or as the difference to an earlier version (``delta``). Engines receive
buckets with ``Arrivals``. Checksums of what was sent prove that the engine computes with it (``sent_weights``). Plugins with transports,
or with engines or trainers in other processes, use this package. Core copies weights within one process and does not need it.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_workers.transport.arrivals import Arrival, Arrivals, Inbox
    from miles_workers.transport.broadcast import Broadcast
    from miles_workers.transport.bucket import Bucket, room_of, round_to_blocks
    from miles_workers.transport.checksum import BLOCK
    from miles_workers.transport.coverage import Coverage
    from miles_workers.transport.delta import difference
    from miles_workers.transport.device_memory import DeviceMemory, Loan
    from miles_workers.transport.weight_names import DRAFT, NameCheck, WeightNames

__all__ = [
    "BLOCK",
    "DRAFT",
    "Arrival",
    "Arrivals",
    "Broadcast",
    "Bucket",
    "Coverage",
    "DeviceMemory",
    "Inbox",
    "Loan",
    "NameCheck",
    "WeightNames",
    "difference",
    "room_of",
    "round_to_blocks",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_workers.transport.arrivals": "Arrival Arrivals Inbox",
        "miles_workers.transport.broadcast": "Broadcast",
        "miles_workers.transport.bucket": "Bucket room_of round_to_blocks",
        "miles_workers.transport.checksum": "BLOCK",
        "miles_workers.transport.coverage": "Coverage",
        "miles_workers.transport.delta": "difference",
        "miles_workers.transport.device_memory": "DeviceMemory Loan",
        "miles_workers.transport.weight_names": "DRAFT NameCheck WeightNames",
    },
)
