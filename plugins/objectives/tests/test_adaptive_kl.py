"""The KL coefficient follows the measured KL, in both places, and continues after a resume."""

import pytest

from miles_core.plugin import ConfigError, PlanError
from miles_objectives.adaptive_kl import next_coefficient
from miles_testing import LearnContract, plan, toy_run

#: An estimator that takes a KL in the reward.
REWARD = {"advantage_estimator": "reinforce_plus_plus"}
ADAPTIVE = {"kl_target": 1e-6, "kl_loss_coef": 0.5}


class TestAdaptiveKl(LearnContract):
    plugins = ("objectives",)
    options = ADAPTIVE


def test_the_formula():
    assert next_coefficient(0.1, kl=0.05, target=0.05, samples=512, horizon=10_000) == 0.1
    assert next_coefficient(0.1, kl=0.055, target=0.05, samples=500, horizon=10_000) == pytest.approx(
        0.1 * (1 + 0.1 * 0.05)
    )
    assert next_coefficient(0.1, kl=9.0, target=0.05, samples=500, horizon=10_000) == pytest.approx(0.1 * 1.01)
    assert next_coefficient(0.1, kl=0.0, target=0.05, samples=500, horizon=10_000) == pytest.approx(0.1 * 0.99)


def test_a_loop_settles_at_the_target():
    """A policy whose KL is inversely proportional to the coefficient."""
    beta = 1.0
    for _ in range(400):
        beta = next_coefficient(beta, kl=0.02 / beta, target=0.1, samples=500, horizon=2000)
    assert 0.02 / beta == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"kl_loss_coef": 0.5},
        {"kl_coef": 0.5, **REWARD},
    ],
)
def test_the_coefficient_rises_is_applied_and_resumed(tmp_path, options):
    options = {**options, "lr": 1e-2, "kl_horizon": 4, "num_steps_per_rollout": 2, "normalize_advantages": False}
    whole = toy_run(steps=4, kl_target=1e-6, **options)
    found = [m["objectives/kl_coef"] for m in whole.metrics]
    # KL is above the target from the first rollout's second optimizer step on: 8 samples, 1 + 0.2 * 8 / 4
    assert found == pytest.approx([0.5 * 1.4**step for step in range(4)])
    fixed = toy_run(steps=4, plugins=["objectives"], **{**options, "kl_horizon": 10_000})
    assert fixed.metrics[0]["train/grad_norm"] == whole.metrics[0]["train/grad_norm"]
    assert fixed.metrics[3]["train/grad_norm"] != whole.metrics[3]["train/grad_norm"]
    toy_run(directory=tmp_path / "run", steps=2, kl_target=1e-6, **options)
    again = toy_run(directory=None, save=None, load=tmp_path / "run", steps=4, kl_target=1e-6, **options)
    names = [n for n in whole.metrics[3] if n.startswith(("train/", "objectives/"))]
    assert {n: again.metrics[3][n] for n in names} == {n: whole.metrics[3][n] for n in names}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kl_target": 0.1}, "which needs a first value"),
        ({**REWARD, "kl_target": 0.1, "kl_coef": 0.1, "kl_loss_coef": 0.1}, "one measured KL adapts one coefficient"),
        (
            {"preset": "dapo", "kl_target": 0.1, "kl_loss_coef": 0.1},
            "--preset dapo takes this value from arXiv 2503.14476",
        ),
        ({"preset": "gspo", "kl_loss_coef": 0.1}, "equation 5 has no KL"),
    ],
)
def test_refused(options, why):
    with pytest.raises(PlanError) as error:
        plan(**options)
    assert why in str(error.value)


def test_a_horizon_without_a_target_is_refused():
    with pytest.raises(ConfigError, match=r"--kl-horizon 5: it needs objectives.kl_target"):
        plan(["objectives"], kl_horizon=5, kl_loss_coef=0.1)
