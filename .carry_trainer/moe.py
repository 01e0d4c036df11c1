import time

import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from miles_core.embedded import experts as E


def best(f, n=20):
    b = 9e9
    for _ in range(n):
        s = time.perf_counter()
        f()
        b = min(b, time.perf_counter() - s)
    return b * 1e3


m = Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=128, num_experts=8, moe_intermediate_size=128))
with torch.no_grad():
    for p in m.parameters():
        p.normal_()
for rows in (1088, 2176, 4352, 8704):
    x = torch.randn(rows, 128, requires_grad=True)
    i = torch.rand(rows, 8).argsort(1)[:, :2].contiguous()
    w = torch.rand(rows, 2, requires_grad=True)
    g = torch.randn(rows, 128)

    def fb():
        E.grouped_experts(m, x, i, w).backward(g)

    with torch.no_grad():
        f = best(lambda: E.grouped_experts(m, x, i, w))
    a = best(fb)
    fl = rows * 2 * 98304 / 2 * 2 / 1e9
    fl = rows * 98304 * 2 / 1e9
    print(rows, "fwd %.2f ms (%.0f GF/s) fwd+bwd %.2f ms (%.0f GF/s)" % (f, fl / f * 1e3, a, 3 * fl / a * 1e3))
