"""How many activation codes change when an engine's FP8 kernel multiplies where the format divides.

Activations of several kinds, BF16, are quantised in blocks of 1 x 128 by the format and by each form of
``miles_fp8.activation_form``. ``codes``: share of E4M3 codes that differ; ``rms``: root mean square of what the differing values
mean, over that of the activations. Forms are exact FP32 here; no engine's kernel is run. The last line is one JSON object.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.measure import finish, installed, options


def kinds(rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Name -> [rows, columns], BF16 numbers in FP32."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, columns, generator=generator)
    tails = normal / torch.rand(rows, columns, generator=generator).clamp(min=1e-3)
    channels = normal * torch.exp(2 * torch.randn(columns, generator=generator))
    made = {"normal": normal, "heavy tails": tails, "outlier channels": channels}
    return {name: x.bfloat16().float() for name, x in made.items()}


def compare(x: torch.Tensor, form: str) -> dict[str, float]:
    """One kind of activations in one form, against division."""
    from miles_fp8.activation_form import FORMS
    from miles_fp8.format import Fp8
    from miles_fp8.layout import AMAX_FLOOR, E4M3, E4M3_MAX, TILE

    blocks = x.reshape(-1, TILE)
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=AMAX_FLOOR)
    codes = {
        "divide": torch.div(blocks, Fp8().scale(amax)),
        form: blocks * FORMS[form](amax)[1],
    }
    divided, own = (c.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8) for c in codes.values())
    difference = Fp8(activation_form=form).fake_quantize_activation(x) - Fp8().fake_quantize_activation(x)
    return {
        "codes": float(f"{float((own != divided).float().mean()):.3g}"),
        "rms": float(f"{float(difference.norm() / x.norm()):.3g}"),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the activations")
    given = parser.parse_args()
    table = {}
    for name, x in kinds(given.size, given.size).items():
        table[name] = {form: compare(x, form) for form in ("reciprocal", "ratio")}
        print(f"{name:17} {table[name]}", file=sys.stderr, flush=True)
    result = {"size": given.size, "against_divide": table}
    finish("fp8_activation_forms", result, given.save, lambda: installed("miles-core", "miles-plugin-fp8", "torch"))


if __name__ == "__main__":
    main()
