"""Whole runs with this trainer. Needs megatron-core; runs on a CPU."""

from importlib.util import find_spec

import pytest

from miles_testing import toy_run

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]


@pytest.fixture(scope="module")
def embedded():
    return toy_run(["r3", "tis"], aux_loss_coef=0.1).metrics


def same(one, other):
    """The steps' rewards, gradients and disagreements are the other's."""
    for a, b in zip(one, other, strict=True):
        assert a["reward/mean"] == b["reward/mean"]
        for name in ("train/grad_norm", "train/load_balance", "train/expert_imbalance"):
            assert a[name] == pytest.approx(b[name], rel=1e-3)
        assert a["r3/tokens_differing"] == pytest.approx(b["r3/tokens_differing"], abs=1e-3)


def test_a_run_with_replay_is_that_of_the_embedded_trainer(embedded):
    same(toy_run(["r3", "tis"], trainer="megatron", aux_loss_coef=0.1).metrics, embedded)


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
def test_one_rank_an_actor(embedded, monkeypatch):
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        given = {"runtime": "ray", "actor_num_gpus_per_node": 2, "expert_model_parallel_size": 2}
        same(toy_run(["r3", "tis"], trainer="megatron", aux_loss_coef=0.1, **given).metrics, embedded)
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("precision", "model", "sizes"),
    [("mxfp8", "qwen3", {"intermediate_size": 64}), ("int4", "qwen3_moe", {"moe_intermediate_size": 32})],
)
def test_a_run_changes_to_a_format_after_its_warm_up_as_the_embedded_trainer_does(precision, model, sizes):
    options = {"rollout_precision": precision, "train_precision": precision, "emulate_precision": True}
    options |= {"int4_group_size": 32} if precision == "int4" else {}
    options |= {"family": model, "sizes": sizes, "warmup_steps": 2, "steps": 3}
    here, there = (toy_run([], trainer=trainer, **options) for trainer in ("embedded", "megatron"))
    for a, b in zip(here.metrics, there.metrics, strict=True):
        assert b["reward/mean"] == a["reward/mean"] and b["mismatch/abs_log_prob"] < 1e-3
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-3)
    assert there.parts[0].precisions.train == precision


@pytest.mark.parametrize("plugins", [["experts"], ["experts", "r3"]])
def test_experts_drop_what_they_drop_in_the_embedded_trainer(plugins):
    """With one sample per prompt, because the embedded trainer computes a shared prompt once."""
    options = {
        "moe_capacity_factor": 0.6,
        "n_samples_per_prompt": 1,
        "rollout_batch_size": 6,
        "steps": 1,
        "aux_loss_coef": 0.1,
    }
    options |= {"micro_batch_size": 6, "advantage_estimator": "reinforce_plus_plus"}
    here, there = (
        next(m for m in toy_run(plugins, trainer=trainer, **options).metrics if "train/loss" in m)
        for trainer in ("embedded", "megatron")
    )
    assert 0.05 < here["moe/dropped_fraction"] < 0.9
    for name in ("moe/dropped_fraction", "train/grad_norm", "train/expert_imbalance", "train/load_balance"):
        assert there[name] == pytest.approx(here[name], rel=1e-3), name


def test_a_critic_learns_what_the_embedded_trainers_does(tmp_path):
    options = {"advantage_estimator": "ppo", "critic_lr": 1e-2, "adam_eps": 1e-2, "normalize_advantages": True}
    here = toy_run(["ppo"], steps=3, **options).metrics
    there = toy_run(["ppo"], tmp_path / "parts", steps=2, trainer="megatron", **options)
    resumed = toy_run(
        ["ppo"], steps=3, directory=None, save=None, load=tmp_path / "parts", trainer="megatron", **options
    )
    for ours, theirs in zip(there.metrics, here, strict=False):
        for name in ("critic/train/value_loss", "critic/train/values", "critic/train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert resumed.metrics[-1]["critic/train/values"] != 0, "a head that was not restored would predict 0"
