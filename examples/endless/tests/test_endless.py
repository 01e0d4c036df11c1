"""An endless source and a group reward, in training, evaluation and after a resume."""

import pytest

from miles_core.plugin import ConfigError
from miles_endless.sums import Sums, make_prompts
from miles_testing import PromptSourceContract, RewardContract, toy_run

OPTIONS = {"prompts": "sums", "prompt_data": "9", "rm_type": "novelty", "custom_rm_path": None}


class TestSums(PromptSourceContract):
    def make(self):
        return Sums(9, None, 0)


class TestHeldOutSums(PromptSourceContract):
    def make(self):
        return make_prompts("9", "evaluation")


class TestNovelty(RewardContract):
    plugins = ("endless",)
    options = OPTIONS


def test_a_resumed_run_goes_on_with_the_next_sum(tmp_path):
    whole = toy_run(["endless"], steps=3, **OPTIONS)
    prompts = [s["prompt"] for s in whole.samples[::4]]
    assert len(set(prompts)) > 3 and all(" + " in p for p in prompts)
    toy_run(["endless"], tmp_path / "run", steps=2, **OPTIONS)
    more = toy_run(["endless"], directory=None, save=None, steps=3, load=tmp_path / "run", **OPTIONS)
    assert [s["prompt"] for s in more.samples[::4]] == prompts


def test_answers_are_scored_within_their_group():
    done = toy_run(["endless"], steps=1, eval_prompts="sums", eval_prompt_data="7", eval_interval=1, **OPTIONS)
    samples = done.samples
    for group in {s["group"] for s in samples}:
        own = [s["response"] for s in samples if s["group"] == group]
        assert [s["reward"] for s in samples if s["group"] == group] == [1 / own.count(r) for r in own]
    assert done.metrics[-1]["eval/reward"] == 1.0  # one answer per held-out sum


def test_data_that_is_no_number():
    with pytest.raises(ConfigError, match="sums takes the largest number as its data, got 'many'"):
        make_prompts("many", "train")
