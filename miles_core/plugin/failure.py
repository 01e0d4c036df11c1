"""Format the traceback of a plugin that cannot be imported, without frames of the import machinery."""

from __future__ import annotations

import traceback
from pathlib import Path

_MACHINERY = ("importlib", "<frozen importlib", str(Path(__file__).parent))


def import_failure(error: BaseException) -> str:
    """Return the traceback of ``error``, without frames of Python's and core's import machinery."""
    formatted = traceback.TracebackException.from_exception(error)
    own = [f for f in formatted.stack if not any(part in f.filename for part in _MACHINERY)]
    formatted.stack = traceback.StackSummary.from_list(own)
    return "".join(formatted.format()).rstrip()
