import resource
import sys

mt = next((int(a[3:]) for a in sys.argv if a.startswith("mt=")), None)
exec(
    open(__import__("os").path.dirname(__import__("os").path.abspath(__file__)) + "/bench.py")
    .read()
    .split("if __name__")[0]
)
import torch

if "norm" in sys.argv:
    sys.path.insert(0, "/tmp/tr")
    import normx

    normx.patch()
m = model()
b = collate(samples("var" in sys.argv))
b.columns["adv"] = torch.randn(len(b.tokens))
t = EmbeddedTrainer(m, TrainerConfig(micro_batch_size=None, max_tokens=mt, optimizer=OptimizerConfig(lr=1e-4)))
loss = lambda o, mb, c: Loss((o.log_probs * mb.columns["adv"]).sum() / 512)
t.bind(Parts(t.forward, loss, t.optimizer_step))
u = []
w = []
for i in range(8):
    s0 = time.time()
    r = resource.getrusage(resource.RUSAGE_SELF)
    t.step(b)
    s = resource.getrusage(resource.RUSAGE_SELF)
    u.append(s.ru_utime + s.ru_stime - r.ru_utime - r.ru_stime)
    w.append(time.time() - s0)
print("mt", mt, "cpu min %.3f wall min %.3f" % (min(u), min(w)))
