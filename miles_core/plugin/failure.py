"""Explain in one line why a plugin cannot be imported."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_core.errors import PluginError, first_line
from miles_core.plugin.renamed import explain_old_name
from miles_core.version import __version__

_MACHINERY = ("importlib", "<frozen importlib", str(Path(__file__).parent))


@contextmanager
def explain_import_failure(who: str, what: str) -> Iterator[None]:
    """Import code of a plugin in this context.

    Args:
        who: the plugin, as ``plugin 'mine' (miles-plugin-mine 0.1.0)``.
        what: the module or file that is imported.

    Raises:
        PluginError: the import failed or called ``sys.exit``.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if old := explain_old_name(error):
            why = f"{old}; change it there, or install a version of the plugin for miles-core {__version__}"
        else:
            why = f"cannot be imported: {_describe(error)}; correct it, or use another version (MILES_DEBUG=1 shows the traceback)"
        raise PluginError(f"{who}: {what} {why}") from error


def _describe(error: BaseException) -> str:
    """Return type, message and place of an error. The place is the innermost line outside the import machinery of Python and core."""
    kind, text = type(error).__name__, first_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _MACHINERY)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{kind if text == kind else f'{kind}: {text}'}{place}"
