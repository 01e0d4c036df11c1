"""Two policies, each with workers of its own."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from miles_core.contracts.run import Run, check_policies
from miles_core.data.sample import Sample
from miles_core.errors import CheckpointError, DataError, PluginError
from miles_core.plugin import Policy
from miles_testing.doubles import remote

#: A second policy that learns from every other group; both are asked in turn.
TWO = """
from miles_core.plugin import Policy, hookimpl

@hookimpl
def on_start(run):
    run.policies.append(Policy(hf_checkpoint=run.policy.hf_checkpoint, name="second"))

@hookimpl
def on_sample(run, sample):
    sample.policy = ("policy", "second")[sample.group_index % 2]
"""


def test_each_policy_has_workers_of_its_own_and_loses_them_alone(toy_run, tmp_path, monkeypatch):
    (tmp_path / "two.py").write_text(TWO)
    plugins, options = [str(tmp_path / "two.py")], {"steps": 3, "save_interval": 1}
    one = toy_run(plugins, **options)
    killed = []
    learn = remote.DoubleWorkers.send

    async def send(self, number, method, *args):
        if method == "learn_stored" and args[0] == 1 and self.names == ("second-trainer-0",) and not killed:
            killed.append(self.names)
            self.crash(number)
        return await learn(self, number, method, *args)

    monkeypatch.setattr(remote.DoubleWorkers, "send", send)
    done = toy_run([*plugins, remote.__file__], runtime="remote", **options)
    assert killed
    names = ("policy/train/grad_norm", "second/train/grad_norm")
    assert [[m[n] for n in names] for m in done.metrics] == [[m[n] for n in names] for m in one.metrics]
    assert {"busy/policy-trainer-0", "busy/second-engine-0"} <= done.metrics[-1].keys()


def test_a_run_goes_on_with_the_policies_that_it_was_saved_with(toy_run, tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    toy_run([str(tmp_path / "two.py")], directory=tmp_path / "run", steps=1)
    (tmp_path / "two.py").write_text(TWO.replace("second", "third"))
    with pytest.raises(CheckpointError, match="holds the policies policy, second, but this run has policy, third;"):
        toy_run(directory=None, save=None, load=tmp_path / "run", steps=2)


@pytest.mark.parametrize(
    ("policies", "match"),
    [
        ([], "is empty after on_start"),
        ([Policy(role="frozen")], "no policy has the role train"),
        ([Policy(role="actor")], "has the role 'actor'; a role is one of train, critic, frozen"),
        ([Policy(), Policy(name="c", role="critic", generates=True)], "c is a critic"),
        ([Policy(generates=False)], "generates=False"),
        ([Policy(), "second"], "holds 'second' after on_start"),
        ([Policy(), Policy()], "two policies have the name 'policy'"),
        *(
            ([Policy(name=name)], "it names a folder of every checkpoint")
            for name in ("", ".", "../x", "a\n", 5, "state")
        ),
    ],
)
def test_policies_that_a_run_cannot_have(policies, match):
    check_policies([Policy(), Policy(name="second-1")])
    with pytest.raises(PluginError, match=match):
        check_policies(policies)


def test_samples_are_divided_by_the_policy_that_they_name():
    first, second, judge = Policy(), Policy(name="second"), Policy(name="judge", role="frozen")
    two = SimpleNamespace(policies=[judge, first, second], policy=first)
    plain = Sample(index=0, group_index=0, prompt="", tokens=[1])
    named = dataclasses.replace(plain, policy="second")
    assert [Run.select_policy(two, each, [[plain, named], [named]]) for each in (first, second, judge)] == [
        [plain],
        [named, named],
        [],
    ]
    for stray in ("third", "judge"):
        with pytest.raises(DataError, match=f"sample 0 names the policy '{stray}', .*are: policy, second"):
            Run.select_policy(two, first, [[named], [dataclasses.replace(plain, policy=stray)]])


def test_the_policies_of_a_file_have_options_of_their_own(toy_run, tmp_path):
    (tmp_path / "two.yaml").write_text("policies: {solver: {lr: 0.01}, proposer: {lr: 0.02, role: train}}")
    (tmp_path / "turns.py").write_text(TWO.split("@hookimpl")[0].replace("Policy, ", "") + TURNS)
    done = toy_run([str(tmp_path / "turns.py")], config=tmp_path / "two.yaml", steps=1, lr=None)
    assert [p.name for p in done.run.policies] == ["solver", "proposer"]
    assert (done.metrics[-1]["solver/train/lr"], done.metrics[-1]["proposer/train/lr"]) == (0.01, 0.02)


#: Groups belong to the two policies in turn.
TURNS = """
@hookimpl
def on_sample(run, sample):
    sample.policy = run.policies[sample.group_index % 2].name
"""
