"""The hook decorators: ``hookimpl`` for a plugin's implementation, ``hookspec`` for core's specification."""

from __future__ import annotations

import pluggy

PROJECT = "miles"
hookspec = pluggy.HookspecMarker(PROJECT)
#: Decorator of a method, or of a function of a single-file plugin, that implements a hook.
hookimpl = pluggy.HookimplMarker(PROJECT)
