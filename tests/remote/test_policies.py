"""Two policies, each with workers of its own."""

from __future__ import annotations

from miles_core.testing.doubles import apart

#: A second policy that learns from every other group; both are asked in turn.
TWO = """
from miles_core import Policy, hookimpl

@hookimpl
def on_start(run):
    run.policies.append(Policy(hf_checkpoint=run.policy.hf_checkpoint, name="second"))

@hookimpl
def on_sample(run, sample):
    sample.metadata["policy"] = ("policy", "second")[sample.group_index % 2]
"""


def test_each_policy_has_workers_of_its_own_and_loses_them_alone(toy_run, tmp_path, monkeypatch):
    (tmp_path / "two.py").write_text(TWO)
    plugins, options = [str(tmp_path / "two.py")], {"steps": 3, "save_interval": 1}
    one = toy_run(plugins, **options)
    killed = []
    learn = apart.ApartWorkers.send

    async def send(self, number, method, *args):
        if method == "at" and args[:2] == (1, "learn") and self.names == ("second-trainer-0",) and not killed:
            killed.append(self.names)
            self.kill(number)
        return await learn(self, number, method, *args)

    monkeypatch.setattr(apart.ApartWorkers, "send", send)
    done = toy_run([*plugins, apart.__file__], runtime="apart", **options)
    assert killed
    names = ("policy/train/grad_norm", "second/train/grad_norm")
    assert [[m[n] for n in names] for m in done.metrics] == [[m[n] for n in names] for m in one.metrics]
    assert {"busy/policy-trainer-0", "busy/second-engine-0"} <= done.metrics[-1].keys()
