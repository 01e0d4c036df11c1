"""The public names for number formats; a format's manifest is created with ``miles_core.format_plugin``.

``Format`` is the contract; ``Stored`` and ``store`` handle its storage. For GPU kernels, ``usable`` checks whether a kernel may
read a tensor, ``readable`` converts the tensor to a supported dtype, and ``room`` returns the output tensors. A ``Product``
multiplies quantised codes on tensor cores. ``Codec`` encodes ``Unit`` objects with a format, as a weight sync does.
"""

from miles_core.config.config import Config
from miles_core.data.unit import Encoded, Unit
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format, Parts, Stored, store
from miles_core.precision.gpu_kernel import READABLE, readable, reference_only, room, usable
from miles_core.precision.product import NoProduct, Product, Products, emulated
from miles_core.precision.scaled_mm import need_scaled_mm

__all__ = [
    "READABLE",
    "Codec",
    "Config",
    "Encoded",
    "Format",
    "NoProduct",
    "Parts",
    "Product",
    "Products",
    "Stored",
    "Unit",
    "emulated",
    "need_scaled_mm",
    "readable",
    "reference_only",
    "room",
    "store",
    "usable",
]
