"""Microseconds of the attention of one layer in a decode step: the embedded engine's kernel against PyTorch's attention.

Each row has one query; rows in groups of eight share a prompt of 64 tokens, as in GRPO. ``kernel`` is ``miles_embedded.engine.attention_kernel``
on slabs of prompts and rows. The others read one slab per row, so the prompt exists eight times: ``sdpa`` is PyTorch's own choice of a kernel
without a mask, which is possible only if all rows have equally many tokens; ``sdpa_mask`` hides the tokens that a row does not have; ``flash`` is
torch's variable-length flash kernel with ``seqused_k``. ``equal`` rows have all their tokens, ``unequal`` rows 65 to all of them. Calls
are recorded in CUDA graphs, and slabs alternate between copies that together exceed the L2 cache. The shapes are those of the models of
``sglang_engine.py``. ``difference`` is the largest difference of an element from attention in FP32, of every side. With ``--check`` the sides
that exist on the device are compared and not timed (``TRITON_INTERPRET=1`` on a CPU). The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.measure import finish, installed, options
from miles_embedded.engine.attention_kernel import attend_rows

#: query heads, heads of keys and values; every head has 128 elements
SHAPES = {"dense": (12, 2), "moe": (16, 2), "8b": (32, 8)}
DIM, PROMPT, GROUP = 128, 64, 8
L2 = 200_000_000


@dataclass
class Rows:
    """The rows of a step, as ``attend_rows`` reads them."""

    prompt_slots: Tensor
    prompt_lengths: Tensor
    lengths: Tensor
    longest: int
    queries: int = 1


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, nargs="+", default=[320, 1024, 4096])
    parser.add_argument("--check", action="store_true", help="compare the results, and measure no times")
    parser.add_argument("--seconds", type=float, default=60, help="begin no further case after this time")
    given = parser.parse_args()
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    for tokens, batch, name, kind in product(given.tokens, given.batches, given.shapes, ("equal", "unequal")):
        if time.perf_counter() - started > given.seconds:
            found["incomplete"] = f"{given.seconds:g} s had passed"
            break
        key = f"{name} batch {batch} tokens {tokens} {kind}"
        found[key] = measure(name, batch, tokens, kind, device, given.check)
        print(f"{time.perf_counter() - started:.1f} s {key}: {json.dumps(found[key])}", file=sys.stderr, flush=True)
    finish("decode_attention", found, given.save, lambda: installed("torch", "triton"))


def measure(name: str, batch: int, tokens: int, kind: str, device: torch.device, check: bool) -> dict[str, Any]:
    """Return side -> its difference from attention in FP32, and the microseconds of a call."""
    heads, kv_heads = SHAPES[name]
    torch.manual_seed(0)
    totals = torch.full((batch,), tokens, device=device)
    if kind == "unequal":
        totals = torch.randint(PROMPT + 1, tokens + 1, (batch,), device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(batch, heads, DIM, device=device, dtype=dtype)
    copies = 1 if check else min(16, max(1, -(-L2 // (4 * batch * kv_heads * tokens * DIM))))
    slabs = [make_slabs(batch, kv_heads, tokens, q) for _ in range(copies)]
    expected = attend_exactly(q, *slabs[0], totals)
    return {side: run(calls, expected, check) for side, calls in sides(q, slabs, totals, kind)}


def run(calls: list[Callable[[], Tensor]], expected: Tensor, check: bool) -> dict[str, Any]:
    """Return the difference and the time of a side, or what it lacks."""
    try:
        found = {"difference": round(float((calls[0]() - expected).abs().max()), 5)}
        return found if check else {**found, "us": time_calls(calls)}
    except RuntimeError as error:  # out of memory, for example
        return {"error": str(error).splitlines()[0]}


def time_calls(calls: list[Callable[[], Tensor]]) -> float:
    """Return the microseconds of one call in a graph of all; ``fp8_product`` explains how."""
    from benchmarks.engine.fp8_product import microseconds

    return microseconds(calls)


def make_slabs(batch: int, kv_heads: int, tokens: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [batch, kv heads, tokens, DIM] whose first PROMPT tokens are the same in each group of rows."""
    slabs = torch.randn(2, batch, kv_heads, tokens, DIM, device=like.device, dtype=like.dtype)
    group = torch.arange(batch, device=like.device) // GROUP * GROUP
    slabs[..., :PROMPT, :] = slabs[:, group, :, :PROMPT]
    return slabs[0], slabs[1]


def attend_exactly(q: Tensor, keys: Tensor, values: Tensor, totals: Tensor) -> Tensor:
    """Return attention [batch, heads, DIM] computed row by row in FP32."""
    rows = []
    for row, total in enumerate(totals.tolist()):
        k, v = (
            slab[row, :, :total].float().repeat_interleave(q.shape[1] // slab.shape[1], 0) for slab in (keys, values)
        )
        weights = (q[row].float()[:, None] @ k.transpose(1, 2) * DIM**-0.5).softmax(-1)
        rows.append((weights @ v)[:, 0])
    return torch.stack(rows)


def sides(
    q: Tensor, slabs: list[tuple[Tensor, Tensor]], totals: Tensor, kind: str
) -> Iterator[tuple[str, list[Callable[[], Tensor]]]]:
    """Yield each side with one call per copy of the slabs; a side's own copies are freed before the next one."""
    yield "kernel", [prepare_kernel(q, *pair, totals) for pair in slabs]
    if kind == "equal":
        yield "sdpa", [partial(attend_torch, q, k, v, None) for k, v in slabs]
    mask = (torch.arange(slabs[0][0].shape[2], device=q.device) < totals[:, None])[:, None, None]
    yield "sdpa_mask", [partial(attend_torch, q, k, v, mask) for k, v in slabs]
    if q.is_cuda:
        yield "flash", [prepare_flash(q, *pair, totals) for pair in slabs]


def prepare_kernel(q: Tensor, keys: Tensor, values: Tensor, totals: Tensor) -> Callable[[], Tensor]:
    """Return a call of the engine's kernel on a slab of prompts, one per group, and a slab of the rows' own tokens."""
    stores = [(slab[::GROUP, :, :PROMPT].contiguous(), slab[:, :, PROMPT:].contiguous()) for slab in (keys, values)]
    slots = torch.arange(len(q), device=q.device) // GROUP
    rows = Rows(slots, torch.full_like(slots, PROMPT), totals - PROMPT - 1, keys.shape[2])
    return lambda: attend_rows(q, stores[0], stores[1], rows, DIM**-0.5)


def attend_torch(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Return PyTorch's attention with grouped heads."""
    return scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)[:, :, 0]


def prepare_flash(q: Tensor, keys: Tensor, values: Tensor, totals: Tensor) -> Callable[[], Tensor]:
    """Return a call of torch's variable-length flash kernel on slabs in its layout, [tokens of all rows, kv heads, DIM]."""
    batch, width = len(q), keys.shape[2]
    k, v = (slab.transpose(1, 2).reshape(batch * width, -1, DIM) for slab in (keys, values))
    queries = torch.arange(batch + 1, device=q.device, dtype=torch.int32)
    keys_before, used = queries * width, totals.to(torch.int32)
    flash = torch.ops.aten._flash_attention_forward
    return lambda: flash(q, k, v, queries, keys_before, 1, width, 0.0, False, False, seqused_k=used)[0]


if __name__ == "__main__":
    main()
