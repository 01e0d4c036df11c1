"""Attention of training over groups that share a prompt, on one GPU: two calls (own tokens, prompt) or one call with copies of the prompt's keys,
each by FlashAttention-2 and by cuDNN (if it is installed). Milliseconds of forward and backward pass, the host's milliseconds, and the largest
relative difference of outputs and gradients from those of the first side. ``trainer.flash`` and ``trainer.cudnn_attention`` choose by these
numbers. Head dimension 128, BF16, 8 responses of a prompt. The last line is one JSON object.

    python -m benchmarks.training.packed_attention --save
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.embedded_rollout import Result
from benchmarks.measure import finish, installed, options
from miles_core.data import Sample, collate
from miles_embedded.trainer import cudnn_attention, flash
from miles_embedded.trainer.packing import Packing, pack

SAMPLES, DIM = 8, 128
#: (query heads, key heads), groups, tokens of a prompt, tokens of a response.
CASES = (
    ((16, 2), 10, 64, 256),
    ((16, 2), 8, 512, 256),
    ((16, 2), 8, 1024, 256),
    ((16, 2), 6, 2048, 256),
    ((16, 2), 2, 8192, 256),
    ((16, 2), 2, 512, 1024),
    ((16, 2), 1, 64, 4096),
    ((16, 2), 1, 2048, 4096),
    ((32, 8), 1, 512, 4096),
    ((16, 8), 8, 256, 256),
    ((16, 8), 8, 512, 256),
    ((16, 16), 10, 64, 256),
    ((16, 16), 8, 256, 256),
    ((16, 16), 8, 512, 256),
)
#: Side -> most keys per query with copies, least work for cuDNN.
SIDES = {
    "two calls": (0.0, 1 << 62),
    "two calls, cudnn": (0.0, 1 << 32),
    "copies": (1e9, 1 << 62),
    "copies, cudnn": (1e9, 1 << 32),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--out", type=Path, help="write results here after every case")
    given = parser.parse_args()
    result = Result(given.out)
    result.put("device", torch.cuda.get_device_name())
    flash._LONGEST = 1 << 30  # the sides below decide
    for heads, groups, prompt, response in CASES:
        name = f"{heads[0]}/{heads[1]} heads, {prompt} + {response} tokens"
        result.put(name, measure(make_packing(groups, prompt, response), *heads))
    finish("packed_attention", result.found, given.save, lambda: installed("torch", "triton", "nvidia-cudnn-frontend"))


def make_packing(groups: int, prompt: int, response: int) -> Packing:
    """Lay out groups of samples of one length."""
    samples = []
    for group in range(groups):
        for _ in range(SAMPLES):
            tokens = [group] * prompt + [groups + len(samples)] * response
            samples.append(Sample(tokens=tokens, response_length=response, group_index=group, index=len(samples)))
    packing = pack(collate(samples))
    return replace(packing, rows=packing.rows.cuda())


def measure(packing: Packing, heads: int, kv_heads: int) -> dict[str, Any]:
    """All sides of one case."""
    rows, generator = len(packing.rows), torch.Generator("cuda").manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn(rows, count, DIM, device="cuda", generator=generator).bfloat16()

    leaves = [draw(count).requires_grad_() for count in (heads, kv_heads, kv_heads)]
    grad, expected = draw(heads), None
    found: dict[str, Any] = {"rows": rows}
    for side, (copied, least) in SIDES.items():
        if "cudnn" in side and not cudnn_attention.cudnn_runs(leaves[0].device):
            continue
        flash._KEYS = flash._ELEMENTS = copied
        cudnn_attention._LEAST_WORK = least
        plan = flash.FlashPlan(packing)

        def compute(plan: flash.FlashPlan = plan) -> list[Tensor]:
            out = flash.flash(*leaves, plan, DIM**-0.5)
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

        values = compute()
        expected = expected or values
        apart = [
            float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(values, expected, strict=True)
        ]
        found[side] = {**timed(compute), "difference": round(max(apart), 5)}
    return found


def timed(compute: Any) -> dict[str, float]:
    """Milliseconds of a call on the GPU (median), and of the host to launch it."""
    from triton.testing import do_bench

    gpu = do_bench(compute, warmup=10, rep=40, return_mode="median")
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        compute()
    host = (time.perf_counter() - started) / 5
    torch.cuda.synchronize()
    return {"ms": round(gpu, 3), "host_ms": round(1e3 * host, 2)}


if __name__ == "__main__":
    main()
