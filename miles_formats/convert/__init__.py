"""Converts checkpoints to a number format, and back to BF16.

A conversion is planned from headers alone and never holds the whole model in memory. It uses the same codec as a weight sync, so the bytes are
equal. ``layout`` describes a checkpoint without its weights, for engines that receive the weights from a trainer.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_formats.convert.checkpoint_layout import Layout, layout

__all__ = ["Layout", "layout"]

__getattr__, __dir__ = make_lazy_exports(__name__, {"miles_formats.convert.checkpoint_layout": "Layout layout"})
