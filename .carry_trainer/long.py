import time

import torch

from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.embedded.attention import PackedCall
from miles_core.embedded.packing import pack
from miles_core.train.trainer import Context

for dtype in (torch.bfloat16, torch.float32):
    for P, R, n in ((512, 512, 8), (1024, 7000, 1), (2048, 1024, 6), (512, 7500, 4)):
        ss = [
            Sample(tokens=[1] * P + [i + 2] * (R - 13 * i), response_length=R - 13 * i, group_index=0, index=i)
            for i in range(n)
        ]
        b = collate(ss)
        b = b
        p = pack(b)
        import dataclasses

        p = dataclasses.replace(p, rows=p.rows.cuda())
        call = PackedCall(Context("train", (0,), p.rows), p)
        T = len(p.rows)
        q = torch.randn(1, 32, T, 128, device="cuda", dtype=dtype, requires_grad=True)
        k = torch.randn(1, 8, T, 128, device="cuda", dtype=dtype, requires_grad=True)
        v = torch.randn(1, 8, T, 128, device="cuda", dtype=dtype, requires_grad=True)
        try:
            for i in range(3):
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                m0 = torch.cuda.memory_allocated()
                t = time.time()
                o = call.attend(torch.nn.Identity(), q, k, v, 128**-0.5)
                torch.cuda.synchronize()
                t1 = time.time() - t
                o.sum().backward()
                torch.cuda.synchronize()
                t2 = time.time() - t
            print(
                dtype,
                P,
                R,
                n,
                "rows",
                T,
                "fwd %.1f ms fb %.1f ms" % (t1 * 1e3, t2 * 1e3),
                "peak %.2f GB" % ((torch.cuda.max_memory_allocated() - m0) / 1e9),
                "q %.3f GB" % (q.nbytes / 1e9),
                flush=True,
            )
        except Exception as e:
            print(dtype, P, R, n, "FAIL", str(e)[:200], flush=True)
