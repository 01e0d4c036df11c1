"""What changes from one optimiser step to the next, and what it takes to send that alone: bytes, seconds, and other compressors.

    python benchmarks/sync/weight_delta.py --model /path/to/SmolLM2-135M-Instruct --save

AdamW on FP32 weights, next tokens of a text; what is sent is the BF16 copy, in buckets as messages carry them. ``changed`` is the share
of BF16 weights that a step changes, ``bytes`` and the compressors' are shares of a full sync. Compressors that are not
installed (lz4, zstandard) are left out.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import finish, installed
from miles_workers.transport import difference
from miles_workers.transport.delta import apply
from miles_zero_copy.paths import ENOUGH

TEXT = Path(__file__).parents[2] / "docs/how-it-works.md"
#: Tokens of a step.
TOKENS = 256


def steps(model: str, rate: float, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Bytes of the BF16 weights before and after each step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(model)(TEXT.read_text(), return_tensors="pt").input_ids
    optimiser = torch.optim.AdamW(trained.parameters(), lr=rate, weight_decay=0.0, betas=(0.9, 0.95))
    before = flat(trained)
    for step in range(count):
        tokens = ids[:, step * TOKENS : (step + 1) * TOKENS]
        trained(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        after = flat(trained)
        yield before, after
        before = after


def flat(model: torch.nn.Module) -> Tensor:
    """The BF16 copy's bytes, a multiple of 8."""
    whole = torch.cat([p.detach().bfloat16().view(-1) for p in model.parameters()]).view(torch.uint8)
    return whole[: len(whole) // 8 * 8]


def others() -> dict[str, Callable[[bytes], bytes]]:
    """Compressors of the whole exclusive or."""
    found: dict[str, Callable[[bytes], bytes]] = {"zlib level 1": lambda data: zlib.compress(data, 1)}
    if find_spec("zstandard"):
        import zstandard

        found["zstandard level 1"] = zstandard.ZstdCompressor(1).compress
    if find_spec("lz4"):
        import lz4.frame

        found["lz4"] = lz4.frame.compress
    return found


def measure(before: Tensor, after: Tensor, compare: bool) -> dict[str, Any]:
    """One step's difference."""
    pieces = list(zip(after.split(ENOUGH), before.split(ENOUGH), strict=True))
    start = time.perf_counter()
    found = [difference(new, old) for new, old in pieces]
    made = time.perf_counter()
    bases = [old.clone() for _, old in pieces]
    begin = time.perf_counter()
    for base, data in zip(bases, found, strict=True):
        assert data is not None
        apply(base, data)
    end = time.perf_counter()
    assert torch.equal(torch.cat(bases), after)
    changed = (before.view(torch.int16) != after.view(torch.int16)).float().mean().item()
    sent = sum(len(data or b"") for data in found)
    rates = {"made_gb_per_second": len(after) / (made - start) / 1e9, "applied": len(after) / (end - begin) / 1e9}
    row: dict[str, Any] = {"changed": changed, "bytes": sent / len(after), **rates}
    if compare:
        data = torch.bitwise_xor(pieces[0][0], pieces[0][1]).numpy().tobytes()
        for name, compress in others().items():
            start = time.perf_counter()
            size = len(compress(data))
            row[name] = {"bytes": size / len(data), "gb_per_second": len(data) / (time.perf_counter() - start) / 1e9}
    return row


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rates", default="1e-6,1e-5", help="learning rates")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for rate in map(float, options.rates.split(",")):
        for number, (before, after) in enumerate(steps(options.model, rate, options.steps)):
            row = {"rate": rate, "step": number, **measure(before, after, number == options.steps - 1)}
            print(
                f"lr {rate:g} step {number}: {row['changed']:.2%} of the weights changed, {row['bytes']:.2%} of the bytes travel, made "
                f"at {row['made_gb_per_second']:.2f} GB/s, applied at {row['applied']:.2f} GB/s",
                flush=True,
            )
            rows.append(row)
    result = {"model": Path(options.model).name, "nbytes": len(before), "bucket": ENOUGH, "steps": rows}
    finish("weight_delta", result, options.save, lambda: installed("torch", "transformers", "numpy"), "")


if __name__ == "__main__":
    main()
