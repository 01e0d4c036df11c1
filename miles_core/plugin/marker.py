"""The marks of hooks: ``hookimpl`` above a plugin's implementation, ``hookspec`` above core's specification."""

from __future__ import annotations

import pluggy

PROJECT = "miles"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
