"""Makes golden_transformer_engine.json: codes and scales of TransformerEngine's Python reference (2.20) of NVFP4.

Run it where TransformerEngine can be imported: ``python golden_transformer_engine.py``. Inputs come from integer
arithmetic, so that they are the same with every version of torch; the file holds them too.
"""

import json
from pathlib import Path

import torch

ROWS, COLUMNS = 4, 96


def inputs(seed: int, exponent: int, tail: bool) -> torch.Tensor:
    """BF16 values around 2^exponent: sums of four uniform ones; with a heavy tail, each 16th is 64 times as large."""
    state, found = seed, []
    for index in range(ROWS * COLUMNS):
        total = 0
        for _ in range(4):
            state = (1103515245 * state + 12345) % 2**31
            total += (state >> 15) - 2**15
        found.append(total / 2**15 * (64.0 if tail and index % 16 == 5 else 1.0) * 2.0**exponent)
    x = torch.tensor(found, dtype=torch.float64).reshape(ROWS, COLUMNS)
    x[2, 16:32] = 0  # a block of zeros
    x[3] *= 2.0**-6  # a row of small blocks
    return x.bfloat16()


def reference(x: torch.Tensor, amax: torch.Tensor, per_token: bool, four_over_six: bool) -> tuple[str, str]:
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

    codes, scales = NVFP4QuantizerRef._quantize_blockwise_reference(
        x,
        amax,
        16,
        1,
        pow_2_scales=False,
        row_scaled_nvfp4=per_token,
        nvfp4_use_4over6=four_over_six,
        nvfp4_e4m3_max=256 if four_over_six else 448,
        nvfp4_4over6_err_mode="MSE",
        eps=0.0,
    )
    return hexadecimal(codes), hexadecimal(scales)


def hexadecimal(tensor: torch.Tensor) -> str:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()).hex()


def main() -> None:
    found = []
    for seed, exponent, tail in [(1, 0, False), (2, -5, True), (3, -40, False), (4, 30, True)]:
        x = inputs(seed, exponent, tail)
        own = x.float().abs().amax()
        amaxes = {"matrix": own, "pair": own * 1.375, "token": x.float().abs().amax(-1, keepdim=True)}
        cases = []
        for four_over_six in (False, True):
            for kind, amax in amaxes.items():  # pair: the other half is larger
                codes, scales = reference(x, amax, kind == "token", four_over_six)
                case = {"kind": kind, "four_over_six": four_over_six, "amax": hexadecimal(amax.reshape(-1))}
                cases.append(case | {"codes": codes, "scales": scales})
        found.append({"shape": [ROWS, COLUMNS], "x": hexadecimal(x), "cases": cases})
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
