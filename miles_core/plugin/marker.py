"""The hook decorators: ``hookimpl`` for a plugin's implementation, ``hookspec`` for core's specification."""

from __future__ import annotations

import pluggy

PROJECT = "miles"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
