"""The decode kernel against the same attention by torch in float64: on a GPU, or by Triton's interpreter where Triton is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from miles_embedded.engine.cache import Cache
from miles_embedded.engine.static_attention import StaticCall
from miles_embedded.engine.static_batch import StaticBatch
from miles_embedded.model.attention import AttentionOptions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: rows, heads, kv heads, dim, value dim, prompt width, own width, options
CASES = [
    (3, 4, 2, 16, 16, 48, 64, {}),
    (2, 4, 2, 24, 12, 300, 290, {}),
    (2, 8, 8, 16, 16, 64, 300, {"window": 70}),
    (2, 4, 2, 16, 16, 64, 300, {"window": 5, "sinks": 4}),
    (2, 4, 2, 16, 16, 64, 300, {"chunk": 48, "cap": 2.0}),
    (4, 2, 1, 16, 16, 640, 120, {}),  # more splits than are merged at once
    (4, 2, 1, 16, 16, 640, 120, {"window": 70}),  # the splits merged first have no visible key
]


@pytest.mark.parametrize("enough", [1 << 30, 1])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_row_attends_to_its_prompt_and_its_own_tokens(triton, monkeypatch, case, queries, enough):
    """With the most splits, and with as few as many rows have."""
    from miles_embedded.engine import attention_kernel
    from miles_embedded.engine.attention_kernel import append_rows, attend_rows

    for name in ("ENOUGH_PROGRAMS", "ENOUGH_SHORT"):
        monkeypatch.setattr(attention_kernel, name, enough)
    rows, heads, kv_heads, dim, value_dim, prompt_width, own_width, given = case
    generator = torch.Generator().manual_seed(0)
    cache, batch = Cache(), StaticBatch(rows, torch.device("cpu"))
    cache.prefixes.reserve(4, prompt_width)
    cache.own.reserve(rows, own_width)
    batch.prompt_slots.copy_(torch.randint(0, 4, (rows,), generator=generator))
    batch.prompt_lengths.copy_(torch.randint(1, prompt_width + 1, (rows,), generator=generator))
    batch.lengths.copy_(torch.randint(0, own_width - queries + 1, (rows,), generator=generator))
    batch.lengths[0] = batch.prompt_lengths[-1] = 0  # as the first token of a row, and as padding
    batch.prompt_lengths[0] = prompt_width
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's bfloat16 products are wrong

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    def slabs(width):
        return normal(cache.prefixes.slots, kv_heads, cache.prefixes.width, width), normal(
            cache.own.slots, kv_heads, cache.own.width, width
        )

    keys, values, q = slabs(dim), slabs(value_dim), normal(rows * queries, heads, dim)
    options = AttentionOptions(**{**given, "sinks": torch.randn(4, generator=generator) if "sinks" in given else None})
    call = StaticCall(None, cache, batch, rows, queries)
    doubled = [[x.double() for x in pair] for pair in (keys, values)]
    expected = call._attend_with_torch(q.double(), *doubled, dim**-0.5, options)
    fed = [pair[1][call.slots, :, call.columns].transpose(0, 1)[None] for pair in (keys, values)]
    for row, length in enumerate(batch.lengths.tolist()):  # what a row does not have is never read
        keys[1][row, :, length:] = values[1][row, :, length:] = torch.nan
    there = StaticBatch(rows, torch.device(DEVICE))
    there._integers.copy_(batch._integers)
    moved = [tuple(x.to(DEVICE) for x in pair) for pair in (keys, values)]
    if options.sinks is not None:
        options = AttentionOptions(**{**given, "sinks": options.sinks.to(DEVICE)})
    there_call = StaticCall(None, cache, there, rows, queries)
    fed = [x.to(DEVICE) for x in fed]
    copied = [(prompts, own.clone()) for prompts, own in moved]
    append_rows(*fed, moved[0][1], moved[1][1], there.lengths, queries)
    found = attend_rows(q.to(DEVICE), *moved, there_call, dim**-0.5, options)
    error = (found.double().cpu() - expected).norm()
    assert error < (1e-2 if DEVICE == "cuda" else 1e-3) * expected.norm()
    fed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in fed]  # as a model computes them
    again = attend_rows(q.to(DEVICE), *copied, there_call, dim**-0.5, options, fed=tuple(fed))
    assert torch.equal(again, found)
    for appended, stored in zip(moved, copied, strict=True):
        assert torch.equal(appended[1].nan_to_num(7), stored[1].nan_to_num(7))


def test_a_query_has_the_same_bits_alone_and_beside_others_of_its_row(triton):
    from miles_embedded.engine.attention_kernel import attend_rows

    generator = torch.Generator().manual_seed(0)
    cache, batch = Cache(), StaticBatch(2, torch.device(DEVICE))
    cache.prefixes.reserve(2, 160)
    cache.own.reserve(2, 64)
    batch.fill([0, 0], np.array([20, 0]), np.array([1, 0]), np.array([150, 7]), [0, 1], [1.0, 1.0], [0, 0])
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    keys, values = ((normal(cache.prefixes.slots, 2, 160, 16), normal(cache.own.slots, 2, 64, 16)) for _ in range(2))
    q = normal(2, 3, 4, 16)
    together = attend_rows(q.flatten(0, 1), keys, values, StaticCall(None, cache, batch, 2, 3), 0.25).view(2, 3, 4, 16)
    for i in range(3):
        call = StaticCall(None, cache, batch, 2, 1, batch.lengths[:2] + i)
        assert torch.equal(attend_rows(q[:, i].contiguous(), keys, values, call, 0.25), together[:, i])


@pytest.mark.parametrize(("longest", "programs", "expected"), [
    (320, 511, (128, 3)), (320, 512, (512, 1)), (1088, 512, (128, 9)), (1088, 1024, (512, 3)), (4608, 512, (512, 9)), (4608, 2048, (1024, 5)),
    (100_000, 1, (2048, 49)), (100, 1, (128, 1)),
])  # fmt: skip
def test_more_rows_have_fewer_splits(triton, longest, programs, expected):
    from miles_embedded.engine.attention_kernel import _split

    assert _split(longest, programs) == expected
