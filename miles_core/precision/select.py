"""Choosing the run's number format (the ``precision`` colleague completes this)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles_core.sync.encode import Codec

if TYPE_CHECKING:
    from miles_core.run import Run


def make_codec(run: Run) -> Codec:
    """The codec of the rollout's precision."""
    return Codec()
