"""Checkpoints into a number format, and back to BF16.

A conversion is planned from headers alone and never holds the model in memory. It uses the codec of a weight sync, so the
bytes are the same. ``layout`` describes a checkpoint without its weights, for engines that get these from a trainer.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_tools.convert.checkpoint_layout import Layout, layout

__all__ = ["Layout", "layout"]

__getattr__, __dir__ = make_lazy_exports(__name__, {"miles_tools.convert.checkpoint_layout": "Layout layout"})
