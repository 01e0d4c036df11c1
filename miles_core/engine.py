"""Public names for engines and transports: the contracts and their data types.

Manifests are made with ``miles_core.plugin``. ``miles_testing`` has the contracts as tests, ``miles_workers.transport`` moves weights between
processes, ``miles_workers`` is for runtimes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_core.contracts.engine import (
        Engine as Engine,
        EnginePart as EnginePart,
        PauseMode as PauseMode,
        Request as Request,
        Response as Response,
        Sampling as Sampling,
        check_scored as check_scored,
    )
    from miles_core.contracts.transport import SyncReport as SyncReport, Transport as Transport
    from miles_core.sync.push import CopyTransport as CopyTransport

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_core.contracts.engine": "Engine EnginePart PauseMode Request Response Sampling check_scored",
        "miles_core.contracts.transport": "SyncReport Transport",
        "miles_core.sync.push": "CopyTransport",
    },
)
__all__ = __dir__()
