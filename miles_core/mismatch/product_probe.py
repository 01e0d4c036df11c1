"""Verifies at the start of a run that a format's native product is correct.

A misplaced scale, a layout that another library version interprets differently or a driver without the kernel yields plausible but wrong
numbers. Therefore the native product multiplies a few matrices before the first step: their blocks differ by powers of two (which
reveals swapped scales), with the shapes of the model's weights, for one row, for a number of rows that no tile size divides, and for
many rows. A long sum of positive numbers reveals accumulators that truncate and do not promote partial sums. Each result is compared
with the emulated product.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from miles_core.errors import MilesError
from miles_core.precision.format import Format
from miles_core.precision.product import Product
from miles_core.precision.products import FLAG, emulate_product

log = logging.getLogger(__name__)

Shape = tuple[int, int]

#: Numbers of rows of the left operand, and the shape of a weight that is always probed: several tiles in each dimension.
_ROWS = (1, 37, 256)
_SHAPE = (384, 640)
_LONG = (128, 32768)


def check_product(
    backend: str,
    format: Format,
    product: Product,
    shapes: Iterable[Shape] = (),
    real: Mapping[str, Tensor] | None = None,
) -> float:
    """Measure the distance of a native product from the emulated one and compare it with the declared bound.

    Args:
        backend: name such as ``engine mine``, for messages.
        format: format of the codes.
        product: the backend's product.
        shapes: [N, K] of the model's weights; each distinct shape is probed.
        real: weights of the model by name.

    Returns:
        The largest measured distance; see ``Product.eps``.

    Raises:
        MilesError: a probe failed or exceeded the bound; names the probe.
    """
    worst = 0.0
    for name, x, weight, bias in _probes(format, product, shapes, real or {}):
        distance = _distance(backend, format, product, name, x, weight, bias)
        if not distance <= product.eps:  # also true for NaN
            raise MilesError(
                f"{backend} multiplies {format.name} codes differently than it declares: bounded({product.eps:g}) "
                f"against the emulated product is declared, measured is bounded({distance:.3g}) on the probe {name!r}. "
                f"The version of torch, its libraries or the driver changed the product: give {FLAG} emulated"
            )
        worst = max(worst, distance)
    log.info(
        "%s, %s: products within %.2g of the emulated ones, %g is declared", backend, format.name, worst, product.eps
    )
    return worst


def _distance(
    backend: str, format: Format, product: Product, name: str, x: Tensor, weight: Tensor, bias: Tensor | None
) -> float:
    parts = format.quantize(weight)
    expected = emulate_product(format, x, parts, bias)
    try:
        found = product(x, product.prepare(parts), bias)
        if found.is_cuda:
            torch.cuda.synchronize(found.device)  # errors of kernels are reported asynchronously
    except (RuntimeError, ValueError, NotImplementedError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MilesError(
            f"{backend} cannot multiply {format.name} codes on the probe {name!r} ({first}); give {FLAG} emulated"
        ) from error
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / size) if bool(size > 0) else float("inf")


def _probes(
    format: Format, product: Product, shapes: Iterable[Shape], real: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None]]:
    """Yield (name, x [M, K], weight [N, K], bias) on the product's device, in its dtype."""
    generator = torch.Generator(product.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=product.device)

    def fits(shape: Shape) -> bool:
        return format.refuse(shape) is None and product.takes(shape)

    def given(name: str, x: Tensor, weight: Tensor, bias: bool) -> tuple[str, Tensor, Tensor, Tensor | None]:
        dtype = product.dtype
        # As large as the product, so that a missing bias is detected.
        size = float(x.norm() * weight.norm() / (x.shape[0] * weight.numel()) ** 0.5)
        added = (normal(len(weight)) * size).to(dtype) if bias else None
        return name, x.to(dtype), weight.to(dtype), added

    for shape in dict.fromkeys(filter(fits, (_SHAPE, *shapes))):
        weight = normal(*shape) * _powers(shape, format.tile, generator)
        for rows in _ROWS:
            x = normal(rows, shape[1]) * _powers((rows, shape[1]), (1, format.tile[1]), generator)
            yield given(f"{rows} x {list(shape)}", x, weight, bias=rows > 1)
    if fits(_LONG):
        yield given("a long sum of positive numbers", normal(_ROWS[1], _LONG[1]).abs(), normal(*_LONG).abs(), False)
    for name, weight in real.items():
        matrix = weight.to(product.device)
        if fits((matrix.shape[0], matrix.shape[1])):
            yield given(name, normal(_ROWS[1], matrix.shape[1]), matrix, False)


def _powers(shape: Shape, tile: Shape, generator: torch.Generator) -> Tensor:
    """Return a matrix of ``shape`` with one power of two from 1/16 to 16 per block."""
    blocks = tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))
    powers = torch.exp2(torch.randint(-4, 5, blocks, generator=generator, device=generator.device).float())
    return powers.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: shape[0], : shape[1]]
