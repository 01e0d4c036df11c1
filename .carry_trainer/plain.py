"""A plain padded step on the same case: Transformers' own attention and experts, all logits."""

import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bench
import torch
from transformers import *


def run(experts, attn, dev="cpu"):
    torch.manual_seed(0)
    m = bench.model().config
    m._attn_implementation = attn
    m._experts_implementation = experts
    m = AutoModelForCausalLM.from_config(
        m, dtype=torch.float32, attn_implementation=attn, experts_implementation=experts
    )
    ss = bench.samples()
    L = max(len(s.tokens) for s in ss)
    ids = torch.tensor([s.tokens + [0] * (L - len(s.tokens)) for s in ss])
    o = torch.optim.AdamW(m.parameters(), 1e-4, fused=True)
    adv = torch.randn(512, L - 1)
    adv[:, :15] = 0
    ts = []
    for i in range(8):
        t = time.perf_counter()
        lp = m(ids, use_cache=False).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ((lp * adv).sum() / 512).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        o.step()
        o.zero_grad()
        ts.append(time.perf_counter() - t)
    print("plain", experts, attn, "min %.3f med %.3f" % (min(ts), sorted(ts)[4]), flush=True)


if __name__ == "__main__":
    for e in ("eager", "grouped_mm"):
        run(e, "sdpa")
