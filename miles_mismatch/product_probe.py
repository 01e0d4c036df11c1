"""Is a format's native product the product it should be? Measured when a run starts.

A scale in the wrong place, a layout another library version reads differently or a driver without the kernel gives
numbers that look like any others. So before the first step the native product multiplies a few matrices whose blocks
differ by powers of two (a scale that is read for its neighbour shows), of the shapes that the model has, for one row,
for a number of rows that no tile divides, and for many; and a long sum of positive numbers, in which what an
accumulator cuts off adds up where partial sums are not promoted. Each result is compared with the emulated product.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from miles_core.errors import MilesError
from miles_core.precision.format import Format
from miles_core.precision.product import FLAG, Product, emulated

log = logging.getLogger(__name__)

Shape = tuple[int, int]

#: Rows of the left operand, and the weight that is probed whatever the model's are: several tiles each way.
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
    """Stop the run where a native product is further from the emulated one than it declares.

    Args:
        backend: as in ``engine mine``, for messages.
        format: whose codes are multiplied.
        product: the backend's.
        shapes: [N, K] of the model's weights; each is probed once.
        real: weights of the model by name.

    Returns:
        The largest distance found; see ``Product.eps``.

    Raises:
        MilesError: a probe failed or was too far off; names it.
    """
    worst = 0.0
    for name, x, weight, bias in _probes(format, product, shapes, real or {}):
        distance = _distance(backend, format, product, name, x, weight, bias)
        if not distance <= product.eps:  # NaN is not
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
    expected = emulated(format, x, parts, bias)
    try:
        found = product(x, product.prepare(parts), bias)
        if found.is_cuda:
            torch.cuda.synchronize(found.device)  # a failed kernel reports late
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
    """(name, x [M, K], weight [N, K], bias) on the product's device, in its dtype."""
    generator = torch.Generator(product.device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=product.device)

    def fits(shape: Shape) -> bool:
        return format.refuse(shape) is None and product.takes(shape)

    def given(name: str, x: Tensor, weight: Tensor, bias: bool) -> tuple[str, Tensor, Tensor, Tensor | None]:
        dtype = product.dtype
        # As large as the product, so that a bias which is not added shows.
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
    """[shape], a power of two from 1/16 to 16 for each block."""
    blocks = tuple(-(-size // step) for size, step in zip(shape, tile, strict=True))
    powers = torch.exp2(torch.randint(-4, 5, blocks, generator=generator, device=generator.device).float())
    return powers.repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)[: shape[0], : shape[1]]
