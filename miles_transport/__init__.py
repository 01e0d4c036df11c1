"""Moving encoded weights between processes: buckets, checksums, and the ways they travel.

Senders pack encoded tensors into buckets (``bucket``) and checksum them (``checksum``). Buckets travel through GPU memory
(``device_memory``), a process group (``broadcast``) or a message that holds differences only (``delta``). Engines take them
with ``Arrivals``. Used by plugins that provide transports, engines or trainers in other processes; core copies weights
within one process and does not need it.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_transport.arrivals import Arrival, Arrivals
    from miles_transport.broadcast import Broadcast
    from miles_transport.bucket import Bucket, room_of, rounded
    from miles_transport.checksum import BLOCK
    from miles_transport.delta import difference
    from miles_transport.device_memory import DeviceMemory, Loan
    from miles_transport.inbox import Inbox

__all__ = [
    "BLOCK",
    "Arrival",
    "Arrivals",
    "Broadcast",
    "Bucket",
    "DeviceMemory",
    "Inbox",
    "Loan",
    "difference",
    "room_of",
    "rounded",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_transport.arrivals": "Arrival Arrivals",
        "miles_transport.broadcast": "Broadcast",
        "miles_transport.bucket": "Bucket room_of rounded",
        "miles_transport.checksum": "BLOCK",
        "miles_transport.delta": "difference",
        "miles_transport.device_memory": "DeviceMemory Loan",
        "miles_transport.inbox": "Inbox",
    },
)
