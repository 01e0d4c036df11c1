"""Explain why a plugin cannot be imported: one line if it was written for another version, else its traceback."""

from __future__ import annotations

import traceback
from pathlib import Path

from miles_core.plugin.renamed import explain_old_name
from miles_core.version import __version__

_MACHINERY = ("importlib", "<frozen importlib", str(Path(__file__).parent))


def import_failure(error: BaseException) -> str:
    """Return the traceback of ``error``, without frames of Python's and core's import machinery."""
    formatted = traceback.TracebackException.from_exception(error)
    own = [f for f in formatted.stack if not any(part in f.filename for part in _MACHINERY)]
    formatted.stack = traceback.StackSummary.from_list(own)
    return "".join(formatted.format()).rstrip()


def describe_import_failure(who: str, what: str, error: BaseException) -> str:
    """Return the error message for code of a plugin that cannot be imported.

    Args:
        who: the plugin, as ``plugin 'mine' (miles-plugin-mine 0.1.0)``.
        what: the module or file that was imported.
        error: what the import raised.
    """
    if old := explain_old_name(error):
        return f"{who}: {what} {old}; change it there, or install a version of the plugin for miles-core {__version__}"
    return f"{who}: {what} cannot be imported:\n{import_failure(error)}"
