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
