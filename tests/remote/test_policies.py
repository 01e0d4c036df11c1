"""Two policies, each with workers of its own."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from miles_core import Policy
from miles_core.contracts.policy import check_policies
from miles_core.contracts.run import Run
from miles_core.data.sample import Sample
from miles_core.errors import CheckpointError, DataError, PluginError
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


def test_a_run_goes_on_with_the_policies_that_it_was_saved_with(toy_run, tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    toy_run([str(tmp_path / "two.py")], directory=tmp_path / "run", steps=1)
    (tmp_path / "two.py").write_text(TWO.replace("second", "third"))
    with pytest.raises(CheckpointError, match="holds the policies policy, second, and this run has policy, third;"):
        toy_run(directory=None, save=None, load=tmp_path / "run", steps=2)


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ([], "is empty after on_start"),
        ([Policy(), "second"], "holds 'second' after on_start"),
        ([Policy(), Policy()], "two policies have the name 'policy'"),
        *(
            ([Policy(name=name)], "it names a folder of every checkpoint")
            for name in ("", ".", "../x", "a\n", 5, "state")
        ),
    ],
)
def test_policies_that_a_run_cannot_have(policies, said):
    check_policies([Policy(), Policy(name="second-1")])
    with pytest.raises(PluginError, match=said):
        check_policies(policies)


def test_samples_are_shared_out_by_name():
    first, second = Policy(), Policy(name="second")
    two = SimpleNamespace(policies=[first, second])
    plain = Sample(index=0, group_index=0, prompt="", tokens=[1])
    named = dataclasses.replace(plain, metadata={"policy": "second"})
    assert Run.own(two, first, [[plain, named]]) == [plain] and Run.own(two, second, [[plain], [named]]) == [
        plain,
        named,
    ]
    stray = dataclasses.replace(plain, metadata={"policy": "third"})
    with pytest.raises(
        DataError, match="sample 0 names the policy 'third' in its metadata, and the run has policy, second"
    ):
        Run.own(two, first, [[named], [stray]])
    assert Run.own(SimpleNamespace(policies=[first]), first, [[stray]]) == [stray]  # a word of the user's own data
