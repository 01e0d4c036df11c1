"""Verifies at the start of a run that each backend quantises as closely to the format as it declares.

Engine and trainer may have their own quantisers: a kernel that multiplies by a reciprocal where the format divides, a library that
rounds a scale up. A backend therefore declares for each format how close its results are (``bytes``, ``values``, or within
``bounded(eps)``), separately for weights and activations. Before the first step both sides quantise a few small probes (random, with a
tile of zeros, with heavy tails, a slice of a real layer), which are compared with the ``Format``; a larger difference than declared
stops the run. A backend that calls the format itself declares ``bytes``. Native products are measured too
(``mismatch.product_probe``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from miles_core.errors import MilesError
from miles_core.mismatch.product_probe import check_product
from miles_core.precision.format import Format
from miles_core.precision.quantizer import BYTES, TENSORS, VALUES, Measured, Quantizer, SideParity, bounded
from miles_core.precision.schedule import PLAIN
from miles_core.sync.push import make_codec

if TYPE_CHECKING:
    from miles_core.contracts.engine import Engine
    from miles_core.contracts.run import Policy, Run
    from miles_core.contracts.trainer import Trainer
    from miles_core.data.weight_unit import WeightUnit
    from miles_core.precision.codec import Codec

log = logging.getLogger(__name__)

Side = Literal["engine", "trainer"]

#: Number of rows of a real layer that are probed, and default number of columns of a synthetic probe.
_ROWS, _COLUMNS = 256, 256


def probes(format: Format, real: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the probes, name -> matrix [rows, K] of BF16 values in FP32.

    Args:
        format: determines the size.
        real: one layer by name, of which a slice is used.
    """
    rows, columns = (2 * size if size <= _COLUMNS else _COLUMNS for size in format.tile)
    rows, columns = max(rows, 16), max(columns, _COLUMNS)
    generator = torch.Generator().manual_seed(0)
    made = {
        "random": torch.randn(rows, columns, generator=generator),
        "a tile of zeros": torch.randn(rows, columns, generator=generator),
        "heavy tails": torch.randn(rows, columns, generator=generator)
        / torch.rand(rows, columns, generator=generator).clamp(min=1e-4),
    }
    made["a tile of zeros"][: format.tile[0], : format.tile[1]] = 0
    made |= {name: tensor[:_ROWS].detach().float().cpu() for name, tensor in (real or {}).items()}
    fitting = {n: t for n, t in made.items() if format.refuse((t.shape[0], t.shape[1])) is None}
    return {name: tensor.bfloat16().float() for name, tensor in fitting.items()}


def measure(format: Format, quantizer: Quantizer, matrices: Mapping[str, Tensor]) -> tuple[Measured, Measured]:
    """Return the worst probe for weights and for activations."""
    weights, activations = [], []
    for name, matrix in matrices.items():
        own, expected = quantizer.weight(matrix), format.quantize(matrix)
        same = own.keys() == expected.keys() and all(_same_bytes(own[k], expected[k]) for k in expected)
        weights.append(_compare(name, same, format.dequantize(own), format.dequantize(expected)))
        read, rounded = quantizer.activation(matrix), format.fake_quantize_activation(matrix)
        activations.append(_compare(name, _same_bytes(read, rounded), read, rounded))
    return _find_worst(weights), _find_worst(activations)


def check(
    backend: str, format: Format, quantizer: Quantizer | None, real: Mapping[str, Tensor] | None = None
) -> SideParity:
    """Measure a backend's quantiser and compare the result with its declaration.

    Args:
        backend: name such as ``engine mine``, for messages.
        format: the run's format.
        quantizer: the backend's quantiser; None if it declares no parity.
        real: one layer of the model by name.

    Returns:
        the declared and the measured parity.

    Raises:
        MilesError: the backend declares nothing for this format, or a probe (also of a product) is worse than declared; names the
            probe.
    """
    if quantizer is None:
        raise MilesError(
            f"{backend} declares no parity for {format.name}, so it is unknown whether it computes with the same "
            "numbers as the other side; use a backend that declares it, or bf16"
        )
    matrices = probes(format, real)
    found = measure(format, quantizer, matrices)
    declared = (quantizer.weights, quantizer.activations)
    for what, is_declared, measured in zip(TENSORS, declared, found, strict=True):
        if not is_declared.covers(measured.parity):
            raise MilesError(
                f"{backend} quantises {format.name} {what} differently than it declares: {is_declared} is declared, "
                f"measured is {measured.parity} ({measured.differing:.2%} of the values of the probe "
                f"{measured.probe!r} differ). Its version or a setting of its kernels changed the numbers: use the "
                "version it was declared for, or bf16"
            )
    log.info("%s, %s: weights %s, activations %s", backend, format.name, found[0].parity, found[1].parity)
    products = None
    if quantizer.product is not None:
        distance = check_product(backend, format, quantizer.product, quantizer.shapes, real)
        products = (bounded(quantizer.product.eps), bounded(distance))
    return SideParity(backend, format.name, tuple(matrices), declared, found, products)


def real_layer(units: Iterable[WeightUnit], codec: Codec) -> dict[str, Tensor]:
    """Return a slice of the first quantised matrix of an export stream, by name. Consumes the whole stream."""
    found: dict[str, Tensor] = {}
    for unit in units:
        for part in () if found else codec.parts(unit):
            for name, tensor in part.tensors.items():
                if not found and codec.quantises(name, tuple(tensor.shape)):
                    found[name] = tensor[:_ROWS].detach().clone()
    return found


def _compare(name: str, same_bytes: bool, found: Tensor, expected: Tensor) -> Measured:
    if same_bytes:
        return Measured(name, BYTES, 0.0)
    found, expected = found.float(), expected.float()
    if torch.equal(found, expected):
        return Measured(name, VALUES, 0.0)
    difference, size = (found - expected).norm(), expected.norm()
    eps = float(difference / size) if bool(size > 0) else float("inf")
    eps = eps if eps == eps else float("inf")  # NaN differs from everything
    return Measured(name, bounded(eps), float((found != expected).float().mean()))


def _find_worst(found: list[Measured]) -> Measured:
    worst = found[0]
    for measured in found[1:]:
        if not worst.parity.covers(measured.parity):
            worst = measured
    return worst


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def check_sides(run: Run, policy: Policy, trainer: Trainer, engine: Engine) -> list[SideParity]:
    """Measure the quantisers of both sides before training. Sides in bf16 are skipped.

    Raises:
        MilesError: a side declares no parity, or is worse than it declares.
    """
    sides: tuple[tuple[Side, str, Callable[[Format], Quantizer | None]], ...] = (
        ("engine", run.config_of(policy).rollout.precision, engine.quantizer),
        ("trainer", run.config_of(policy).train.precision, trainer.quantizer),
    )
    real: dict[str, Tensor] | None = None
    found = []
    for side, precision, quantizer in sides:
        if precision != PLAIN:
            codec = make_codec(run, policy, precision)
            real = real_layer(trainer.units(), codec) if real is None else real
            found.append(check_side(run, policy, side, precision, quantizer, real))
    return found


def check_side(
    run: Run,
    policy: Policy,
    side: Side,
    precision: str,
    quantizer: Callable[[Format], Quantizer | None],
    real: Mapping[str, Tensor],
) -> SideParity:
    """Call ``check`` for one side of a run, in the process of that side.

    Args:
        precision: the format's name.
        quantizer: ``Engine.quantizer`` or ``Trainer.quantizer``.
        real: one layer of the model by name (``real_layer``), sent by the trainer's process.
    """
    format = make_codec(run, policy, precision).format
    assert format is not None  # the name of a format
    return check(f"{side} {getattr(run.config.run, side)}", format, quantizer(format), real)
