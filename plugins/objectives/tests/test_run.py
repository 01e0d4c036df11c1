"""Presets in plans, and the losses in runs."""

import pytest

from miles_core.plugin import ConfigError, DataError, PlanError
from miles_objectives.presets import PRESETS
from miles_testing import plan, toy_run

TWO = (
    "async def reward(args, sample):\n    last = sample.tokens[-1]\n    return {'even': last % 2, 'sum': last / 100}\n"
)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_the_values_of_its_paper_and_says_where_they_are_from(name):
    accepted = plan(preset=name)
    values = {path: value for path, (value, _) in PRESETS[name].values.items()}
    assert {s.path: s.value for s in accepted.sets if s.plugin == "objectives"} == values
    shown = "\n".join(accepted.advice)
    for path, (value, section) in PRESETS[name].values.items():
        assert f"{path} = {value} ({section})" in shown
    assert PRESETS[name].paper in shown


def test_a_preset_that_contradicts_an_option_is_refused():
    with pytest.raises(PlanError) as error:
        plan(preset="dapo", eps_clip_high=0.3)
    message = str(error.value)
    assert "--preset dapo takes this value from arXiv 2503.14476, section 3.1" in message
    assert "--eps-clip-high 0.3" in message and "leave your value out" in message
    assert plan(preset="dapo", eps_clip_high=0.28)
    with pytest.raises(ConfigError, match="dapoo"):
        plan(preset="dapoo")


def test_a_preset_changes_the_run():
    done = toy_run(steps=1, preset="gspo")
    found = done.run.config.algorithm
    assert (found.advantage_estimator, found.eps_clip, found.eps_clip_high) == ("gspo", 3e-4, 4e-4)


@pytest.mark.parametrize("name", ["gmpo", "sapo", "dppo", "dro"])
def test_runs_learn_with_each_loss_whatever_the_micro_batches(name):
    options = {"advantage_estimator": name, "num_steps_per_rollout": 2, "clip_grad": 0, "kl_loss_coef": 0.1}
    options |= {"dppo_threshold": 1e-4} if name == "dppo" else {}
    whole = toy_run(steps=1, **options).metrics[0]
    split = toy_run(steps=1, micro_batch_size=1, **options).metrics[0]
    plain = toy_run(steps=1, **{**options, "advantage_estimator": "grpo", "dppo_threshold": None}).metrics[0]
    names = ("train/loss", "train/grad_norm", "train/approx_kl_k3")
    assert {n: split[n] for n in names} == pytest.approx({n: whole[n] for n in names}, rel=2e-4, abs=1e-6)
    assert whole["train/grad_norm"] > 0 and whole["train/loss"] != plain["train/loss"]


def test_gdpo_reads_several_rewards(tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    options = {"advantage_estimator": "gdpo", "custom_rm_path": f"{tmp_path / 'two.py'}:reward", "reward_key": "even"}
    both = toy_run(steps=1, gdpo_rewards="even,sum=2", **options).metrics[0]
    one = toy_run(steps=1, gdpo_rewards="even", **options).metrics[0]
    assert both["train/grad_norm"] > 0 and both["train/grad_norm"] != one["train/grad_norm"]
    with pytest.raises(DataError, match=r"the reward of sample .* has the entries even, sum"):
        toy_run(steps=1, gdpo_rewards="even,odd", **options)
    with pytest.raises(ConfigError, match="the weight 'much' is not a number"):
        toy_run(steps=1, gdpo_rewards="even=much", **options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"advantage_estimator": "gdpo"}, "--gdpo-rewards NAME"),
        ({"advantage_estimator": "sapo", "n_samples_per_prompt": 1}, "with a single sample they are all 0"),
        ({"advantage_estimator": "dro", "kl_coef": 0.1}, "use --kl-loss-coef"),
        ({"advantage_estimator": "gmpo", "gamma": 0.9}, "which no discount changes"),
    ],
)
def test_refused(options, why):
    with pytest.raises(PlanError) as error:
        plan(["objectives"], **options)
    assert why in str(error.value)


def test_several_rewards_without_gdpo_are_refused():
    with pytest.raises(ConfigError, match=r"--gdpo-rewards a: it needs algorithm.advantage_estimator == gdpo"):
        plan(["objectives"], gdpo_rewards="a", advantage_estimator="sapo")


def test_bounds_of_other_losses_are_a_line_of_the_plan():
    accepted = plan(["objectives"], advantage_estimator="sapo", eps_clip=0.1)
    assert any("no effect: --eps-clip, --eps-clip-high and --eps-clip-c" in line for line in accepted.advice)
    assert not any("no effect" in line for line in plan(["objectives"], advantage_estimator="sapo").advice)
