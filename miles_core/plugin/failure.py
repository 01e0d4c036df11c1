"""The traceback of a plugin that cannot be imported, without the frames of Python's and our own import machinery."""

from __future__ import annotations

import traceback
from pathlib import Path

_MACHINERY = ("importlib", "<frozen importlib", str(Path(__file__).parent))


def import_failure(error: BaseException) -> str:
    """What went wrong inside the plugin, as Python prints it."""
    told = traceback.TracebackException.from_exception(error)
    own = [f for f in told.stack if not any(part in f.filename for part in _MACHINERY)]
    told.stack = traceback.StackSummary.from_list(own)
    return "".join(told.format()).rstrip()
