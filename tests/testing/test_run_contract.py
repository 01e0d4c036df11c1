"""The contracts of parts of a run: core's own parts pass, and each test can fail."""

import pytest

from miles_testing import OptimizerContract, RewardContract, RolloutFunctionContract, RunContract

PLUGIN = """
import itertools
import random

import torch

from miles_core.plugin import Plugin

plugin = Plugin(
    name="odd", summary="mistakes", version="1", core=">=0",
    provides={"reward": {"drifts": "make_drifting"}, "optimizer": {"forgets": "make_forgetful", "stands": "make_standing"}},
)
calls = itertools.count()


def make_drifting(run):
    async def reward(args, sample):
        return float(next(calls))

    return reward


class Forgetful(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += random.random() * 1e-3


def make_forgetful(run, policy, groups):
    return Forgetful(groups, lr=1.0)


class Standing(torch.optim.SGD):
    def step(self, closure=None):
        pass


def make_standing(run, policy, groups):
    return Standing(groups, lr=1.0)
"""


LABELS = {"rm_type": "f1", "custom_rm_path": None, "label_key": "label"}


class TestTurn(RolloutFunctionContract):
    """Core's own rollout function."""


class TestText(RewardContract):
    options = LABELS


class TestAdamW(OptimizerContract):
    """Core's own optimizer."""


@pytest.fixture
def odd(tmp_path):
    path = tmp_path / "odd.py"
    path.write_text(PLUGIN)
    return str(path)


def fails(contract, test, *args, **attributes):
    suite = type("Suite", (contract,), attributes)()
    with pytest.raises(AssertionError):
        getattr(suite, test)(*args)


def test_state_between_runs_is_found(odd):
    fails(RunContract, "test_two_runs_are_equal", plugins=(odd,), options={"rm_type": "drifts", "custom_rm_path": None})


def test_state_outside_of_checkpoints_is_found(odd, tmp_path):
    options = {"rm_type": "drifts", "custom_rm_path": None}
    fails(RunContract, "test_a_resumed_run_equals_an_uninterrupted_one", tmp_path, plugins=(odd,), options=options)


def test_an_optimizer_that_ignores_its_learning_rate_is_found(odd):
    fails(
        OptimizerContract, "test_a_learning_rate_of_0_changes_nothing", plugins=(odd,), options={"optimizer": "forgets"}
    )


def test_an_optimizer_that_does_nothing_is_found(odd):
    fails(OptimizerContract, "test_it_changes_the_weights", plugins=(odd,), options={"optimizer": "stands"})
