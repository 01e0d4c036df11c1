"""What the module of a number format imports; its manifest is made with ``miles_core.plugin.format_plugin``.

``Format`` is the contract, ``Stored`` and ``store`` are for its storage. A GPU kernel is used where ``runs_kernels`` is true, reads
``convert_for_kernel`` results and writes into ``allocate_output``. A ``Product`` multiplies codes on tensor cores. ``Codec`` encodes ``Unit`` s
with a format, as a weight sync does; ``make_codec`` makes the one of a policy. Backends say with ``Quantizer`` and ``Parity`` how they
quantise.
"""

from miles_core.config.config import Config
from miles_core.data.unit import Encoded, Unit
from miles_core.precision.codec import Codec
from miles_core.precision.format import Format, Parts, Stored, store
from miles_core.precision.gpu_kernel import READABLE, allocate_output, convert_for_kernel, reference_only, runs_kernels
from miles_core.precision.product import NoProduct, Product
from miles_core.precision.products import Products, emulate_product
from miles_core.precision.quantizer import BYTES, VALUES, FormatItself, Parity, Quantizer, bounded
from miles_core.precision.scaled_mm import need_scaled_mm
from miles_core.sync.push import make_codec

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
    "allocate_output",
    "bounded",
    "convert_for_kernel",
    "emulate_product",
    "make_codec",
    "need_scaled_mm",
    "reference_only",
    "runs_kernels",
    "store",
]
