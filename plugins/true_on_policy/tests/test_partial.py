"""Responses that continue under new weights: every token has the log-probability of the trainer at the weights that generated it."""

from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from miles_core.errors import PlanError
from miles_testing.toy import plan

#: Records, before each update, the largest gap of each weight version's tokens against a trainer with that version's weights.
VERSIONS = '''
"""Compares the tokens of each weight version with the trainer that had these weights."""
import numpy as np

from miles_core.mismatch.probe import bare
from miles_core.plugin import hookimpl


class Versions:
    def __init__(self):
        self.weights, self.found = {}, []

    @hookimpl
    def on_model(self, model, role):
        if role == "train":
            self.model = model

    @hookimpl
    def wrap_learn(self, run, policy, handles):
        run.state["versions"] = self.found

        def wrap(learn):
            async def measure(samples, step):
                now = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
                self.weights[policy.version] = now
                for version in sorted({v for s in samples for v in s.versions.tolist()}):
                    current = version == policy.version
                    self.model.load_state_dict(self.weights[version])
                    # the routes of older tokens are those of the newest weights
                    scored = samples if current else [bare(s) for s in samples]
                    for s, row in zip(samples, await handles[policy.name].log_probs(scored), strict=True):
                        gap = np.abs(np.float32(s.rollout_log_probs) - row)[s.versions == version]
                        self.found.append((step, policy.version - version, len(set(s.versions.tolist())), gap))
                self.model.load_state_dict(now)
                return await learn(samples, step)

            return measure

        return wrap


hooks = Versions()
on_model, wrap_learn = hooks.on_model, hooks.wrap_learn
'''
REMOTE = str(files("miles_testing") / "doubles" / "remote.py")
#: More requests than the engine runs at a time, so that a collection ends while responses are incomplete.
PARTIAL = {"partial_rollout": True, "over_sampling_batch_size": 4, "max_running_requests": 6}
OPTIONS = {**PARTIAL, "rollout_max_response_len": 16, "lr": 1e-2}


@pytest.fixture
def versions(tmp_path):
    path = tmp_path / "versions.py"
    path.write_text(VERSIONS)
    return str(path)


def gaps_of(run, older):
    """The gaps of all tokens of current or older weights."""
    found = [gap for _, age, _, gap in run.run.state["versions"] if (age > 0) == older]
    return np.concatenate(found)


def current(run):
    """The largest difference of a token of the trained weights in each step that has such tokens."""
    name = "mismatch/current_abs_log_prob_max"
    return [record[name] for record in run.metrics if name in record]


def assert_exact(run, steps):
    assert any(count > 1 for _, _, count, _ in run.run.state["versions"])  # responses of two versions
    newest, oldest = gaps_of(run, older=False), gaps_of(run, older=True)
    assert len(newest) > 10 and len(oldest) > 10 and not newest.any() and not oldest.any()
    assert len(current(run)) >= steps - 1 and not any(current(run))
    assert all(r["mismatch/abs_log_prob_max"] > 0 for r in run.metrics if r["rollout/stale_tokens"])


def test_every_token_has_the_bits_of_its_weights(toy_run, versions):
    assert_exact(toy_run(["true_on_policy", "r3", versions], steps=3, **OPTIONS), 3)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [2, 3])
def test_twenty_steps(toy_run, versions, prompts):
    options = {
        **OPTIONS,
        "rollout_batch_size": prompts,
        "over_sampling_batch_size": 2 * prompts,
        "micro_batch_size": prompts,
    }
    run = toy_run(["true_on_policy", "r3", versions], steps=20, **options)
    assert_exact(run, 20)


def test_routes_of_the_sampling_weights_are_not_exact(toy_run, versions, monkeypatch):
    monkeypatch.setattr("miles_r3.hooks.replace", lambda spec, **changes: replace(spec, dtype=changes["dtype"]))
    run = toy_run(["true_on_policy", "r3", versions], steps=3, **OPTIONS)
    assert gaps_of(run, older=False).any() and any(current(run))


@pytest.mark.parametrize(
    ("plugins", "options"),
    [
        ([], {"pause_generation_mode": "retract"}),
        (["r3"], {"schedule": "async", "over_sampling_batch_size": None, "partial_rollout": None}),
        (["r3", REMOTE], {"runtime": "remote"}),
        (["r3"], {"num_steps_per_rollout": 2}),
    ],
    ids=["retract", "async", "remote", "two-steps"],
)
def test_other_ways_to_continue(toy_run, plugins, options):
    run = toy_run(["true_on_policy", *plugins], steps=3, **{**OPTIONS, **options})
    assert current(run) and not any(current(run)) and any(r["rollout/stale_tokens"] for r in run.metrics)


def test_the_routes_of_the_newest_weights_are_replayed():
    accepted = plan(["true_on_policy", "r3"], **PARTIAL)
    assert accepted.fact("r3.recomputed") == "newest"
    assert plan(["r3"], **PARTIAL).fact("r3.recomputed") == "sampled"
    assert plan(["true_on_policy", "r3"]).fact("r3.recomputed") == "sampled"


@pytest.mark.parametrize(
    ("plugins", "mode", "because"),
    [
        ([], "in_place", "attend to keys and values of older weights"),
        (["r3"], "retract", "returns the routes with which its tokens were sampled"),
    ],
)
def test_a_pause_that_keeps_older_values_is_refused(plugins, mode, because):
    with pytest.raises(PlanError, match=because):
        plan(["true_on_policy", *plugins], **PARTIAL, pause_generation_mode=mode)
