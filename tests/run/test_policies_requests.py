"""Requests and rewards know the policy that they belong to."""

REWARDS = """
from miles_core.plugin import Plugin, Policy, group_reward, hookimpl

plugin = Plugin(
    name="rewards", summary="a reward for each policy", version="1", core=">=0", hooks={"": ""},
    provides={"reward": {"each": "make_each", "all": "make_all", "groups": "make_groups"}},
)
MADE = []

@hookimpl
def on_start(run):
    MADE.clear()
    run.state["made"], run.state["asked"] = MADE, []
    run.policies.append(Policy(run.policy.hf_checkpoint, "second"))

@hookimpl
def on_request(run, policy, request):
    run.state["asked"].append((policy.name, request.policy))

@hookimpl
def on_sample(run, sample):
    sample.policy = run.policies[sample.index % 2].name

def make_each(run, policy):
    MADE.append(policy.name)
    async def reward(args, sample):
        assert sample.policy == policy.name
        return {"policy": 1.0, "second": 2.0}[policy.name] + sample.index
    return reward

def make_groups(policy):
    MADE.append(policy.name)
    @group_reward
    async def reward(args, samples):
        assert {sample.policy for sample in samples} == {policy.name} and len(samples) == 2
        return [float(sample.index) for sample in samples]
    return reward

def make_all(run):
    MADE.append("run")
    async def reward(args, sample):
        return float(sample.index)
    return reward
"""


def rewards(toy_run, tmp_path, name):
    (tmp_path / "rewards.py").write_text(REWARDS)
    done = toy_run([str(tmp_path / "rewards.py")], steps=1, custom_rm_path=None, rm_type=name)
    assert {pair[0] for pair in done.run.state["asked"]} == {"policy"}
    assert all(policy == named for policy, named in done.run.state["asked"])
    return done.run.state["made"], {sample["index"]: sample["reward"] for sample in done.samples}


def test_a_reward_that_takes_the_policy_is_made_for_each(toy_run, tmp_path):
    made, found = rewards(toy_run, tmp_path, "each")
    assert made == ["policy", "second"] and found == {n: n + 1.0 + n % 2 for n in range(8)}


def test_a_group_reward_that_takes_the_policy_gets_its_samples(toy_run, tmp_path):
    made, found = rewards(toy_run, tmp_path, "groups")
    assert made == ["policy", "second"] and found == {n: float(n) for n in range(8)}


def test_another_reward_is_made_once(toy_run, tmp_path):
    made, found = rewards(toy_run, tmp_path, "all")
    assert made == ["run"] and found == {n: float(n) for n in range(8)}


NAMING = """
from miles_core.plugin import Policy, hookimpl

@hookimpl
def on_start(run):
    run.policies.append(Policy(run.policy.hf_checkpoint, "second"))
"""


def test_a_policy_that_no_step_trained_is_reported_at_the_end(toy_run, tmp_path):
    (tmp_path / "naming.py").write_text(NAMING)
    done = toy_run([str(tmp_path / "naming.py")], steps=1)
    assert "no step trained second: a policy learns from" in (done.directory / "run.log").read_text()
    (tmp_path / "both.py").write_text(
        NAMING
        + """
@hookimpl
def on_sample(run, sample):
    sample.policy = run.policies[sample.index % 2].name
"""
    )
    done = toy_run([str(tmp_path / "both.py")], steps=1)
    assert "no step trained" not in (done.directory / "run.log").read_text()
