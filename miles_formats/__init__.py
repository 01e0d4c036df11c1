"""Number formats: the encoder of weights, conversion of checkpoints, and the API for modules of formats.

``format_plugin`` makes a format's manifest, and ``Fp8Options`` are options that several formats share. ``Format`` is the contract,
``Stored`` and ``store`` are for its storage. A GPU kernel is used where ``runs_kernels`` is true, reads ``convert_for_kernel`` results and
writes into ``allocate_output``. A ``Product`` multiplies codes on tensor cores. ``FormatCodec`` encodes ``WeightUnit`` s with a format, as
a weight sync does; ``make_codec`` creates the codec of a policy. Backends declare how they quantise with ``Quantizer`` and ``Parity``, and
ask ``miscompiles_delta_rule`` before they run other people's kernels. ``use_float32_products`` keeps PyTorch from rounding FP32 to TF32. Names are
imported on first use, so that a manifest imports no torch.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports

if TYPE_CHECKING:
    from miles_core.config.config import Config as Config
    from miles_core.data.weight_unit import WeightUnit as WeightUnit
    from miles_core.precision.codec import Codec as Codec
    from miles_core.precision.format import Format as Format, Parts as Parts, Stored as Stored, store as store
    from miles_core.precision.product import NoProduct as NoProduct, Product as Product
    from miles_core.precision.products import Products as Products, emulate_product as emulate_product
    from miles_core.precision.quantizer import (
        BYTES as BYTES,
        VALUES as VALUES,
        FormatItself as FormatItself,
        Parity as Parity,
        Quantizer as Quantizer,
        bounded as bounded,
    )
    from miles_core.sync.push import make_codec as make_codec
    from miles_formats.codec import FormatCodec as FormatCodec
    from miles_formats.float32 import use_float32_products as use_float32_products
    from miles_formats.fp8_options import Fp8Options as Fp8Options
    from miles_formats.gpu_kernel import (
        READABLE as READABLE,
        allocate_output as allocate_output,
        convert_for_kernel as convert_for_kernel,
        miscompiles_delta_rule as miscompiles_delta_rule,
        reference_only as reference_only,
        runs_kernels as runs_kernels,
    )
    from miles_formats.manifest import format_plugin as format_plugin
    from miles_formats.scaled_mm import need_scaled_mm as need_scaled_mm

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_core.config.config": "Config",
        "miles_core.data.weight_unit": "WeightUnit",
        "miles_core.precision.codec": "Codec",
        "miles_core.precision.format": "Format Parts Stored store",
        "miles_core.precision.product": "NoProduct Product",
        "miles_core.precision.products": "Products emulate_product",
        "miles_core.precision.quantizer": "BYTES VALUES FormatItself Parity Quantizer bounded",
        "miles_core.sync.push": "make_codec",
        "miles_formats.codec": "FormatCodec",
        "miles_formats.float32": "use_float32_products",
        "miles_formats.fp8_options": "Fp8Options",
        "miles_formats.gpu_kernel": "READABLE allocate_output convert_for_kernel miscompiles_delta_rule reference_only runs_kernels",
        "miles_formats.manifest": "format_plugin",
        "miles_formats.scaled_mm": "need_scaled_mm",
    },
)
__all__ = __dir__()
