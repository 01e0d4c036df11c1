"""What the module of a number format imports; its manifest is made with ``miles_core.plugin.format_plugin``.

``Format`` is the contract, ``Stored`` and ``store`` are for its storage. A GPU kernel is used where it is ``usable``, reads
``readable`` tensors and writes into ``room``. A ``Product`` multiplies codes on tensor cores. ``Codec`` encodes ``Unit`` s
with a format, as a weight sync does; ``make_codec`` makes the one of a policy. Backends say with ``Quantizer`` and ``Parity`` how they
quantise.
"""

from miles_core.config.config import Config
from miles_core.data.unit import Encoded, Unit
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format, Parts, Stored, store
from miles_core.precision.gpu_kernel import READABLE, readable, reference_only, room, usable
from miles_core.precision.product import NoProduct, Product, Products, emulated
from miles_core.precision.quantizer import BYTES, VALUES, FormatItself, Parity, Quantizer, bounded
from miles_core.precision.scaled_mm import need_scaled_mm
from miles_core.sync.precision import make_codec

__all__ = [
    "BYTES",
    "READABLE",
    "VALUES",
    "Codec",
    "Config",
    "Encoded",
    "Format",
    "FormatItself",
    "NoProduct",
    "Parity",
    "Parts",
    "Product",
    "Products",
    "Quantizer",
    "Stored",
    "Unit",
    "bounded",
    "emulated",
    "make_codec",
    "need_scaled_mm",
    "readable",
    "reference_only",
    "room",
    "store",
    "usable",
]
