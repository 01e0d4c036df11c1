import sys
import time

import numpy as np
import torch
from transformers import *

from miles_core.data.batch import collate
from miles_core.data.sample import Sample
from miles_core.embedded.model import NAME, prepare
from miles_core.embedded.trainer import *
from miles_core.train.trainer import Loss


def model():
    torch.manual_seed(0)
    c = Qwen3MoeConfig(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        intermediate_size=256,
        vocab_size=64,
        norm_topk_prob=True,
    )
    m = AutoModelForCausalLM.from_config(c, dtype=torch.float32, attn_implementation=NAME, experts_implementation=NAME)
    return prepare(m)


def samples(var=False):
    r = np.random.default_rng(0)
    out = []
    for g in range(64):
        p = r.integers(0, 64, 16 if not var else int(r.integers(12, 20))).tolist()
        for i in range(8):
            k = 16 if not var else int(r.integers(4, 17))
            resp = r.integers(0, 64, k).tolist()
            out.append(
                Sample(tokens=p + resp, response_length=k, group_index=g, index=len(out), rollout_log_probs=[0.0] * k)
            )
    return out


if __name__ == "__main__":
    m = model()
    var = "var" in sys.argv
    mt = next((int(a[3:]) for a in sys.argv if a.startswith("mt=")), None)
    b = collate(samples(var))
    b.columns["adv"] = torch.randn(len(b.tokens))
    t = EmbeddedTrainer(m, TrainerConfig(micro_batch_size=None, max_tokens=mt, optimizer=OptimizerConfig(lr=1e-4)))
    loss = lambda o, mb, c: Loss((o.log_probs * mb.columns["adv"]).sum() / 512)
    t.bind(Parts(t.forward, loss, t.optimizer_step))
    ts = []
    for i in range(12):
        s = time.time()
        t.step(b)
        ts.append(time.time() - s)
    print(
        "params",
        sum(p.numel() for p in m.parameters()),
        "rows",
        len(pack(b).rows),
        "min %.3f med %.3f" % (min(ts), sorted(ts)[len(ts) // 2]),
    )
    if "prof" in sys.argv:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU]) as p:
            t.step(b)
        print(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=32, max_name_column_width=45))
