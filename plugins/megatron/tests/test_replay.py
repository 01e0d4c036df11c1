"""A recorded step of this trainer is repeated bit for bit. Needs megatron-core; runs on a CPU."""

from importlib.util import find_spec

import pytest

from miles_testing import toy_run
from miles_tools.replay.again import repeat_step
from miles_tools.replay.stored_run import StoredRun

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]
OPTIONS = {"steps": 3, "record_steps": True, "save_interval": 2, "num_steps_per_rollout": 2, "trainer": "megatron"}


def check_repeated(directory, step, start, target):
    done = repeat_step(directory, step, target)
    assert (done.start, done.tolerance, done.difference) == (start, 0.0, None)
    assert all(row[3] for row in done.rows)
    assert {row[0] for row in done.rows} >= {"train/loss", "train/grad_norm", "gradients", "weights"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return toy_run(["r3"], tmp_path_factory.mktemp("recorded") / "run", aux_loss_coef=0.1, **OPTIONS).directory


@pytest.mark.parametrize(("step", "start"), [(3, 2), (2, 0)])
def test_a_step_is_repeated_from_a_checkpoint_and_from_the_initial_weights(recorded, step, start, tmp_path):
    check_repeated(recorded, step, start, tmp_path / "again")
    ours, theirs = (StoredRun(path).metrics[step] for path in (recorded, tmp_path / "again"))
    assert theirs["r3/tokens_differing"] == ours["r3/tokens_differing"], "the routes of the record are replayed"


def test_tensors_have_the_names_of_their_parameters(recorded):
    (steps,) = StoredRun(recorded).sums(1).values()
    names = {name.removeprefix("module.") for name in steps[0]["gradients"]}
    assert "embedding.word_embeddings.weight" in names and "decoder.layers.1.mlp.router.weight" in names


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
@pytest.mark.parametrize(
    "sizes",
    [
        {"expert_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ],
    ids=["experts", "stages", "tensors"],
)
def test_a_step_of_several_ranks_is_repeated(sizes, tmp_path, monkeypatch):
    import ray

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        options = {**OPTIONS, "runtime": "ray", "actor_num_gpus_per_node": 2, "aux_loss_coef": 0.1, **sizes}
        directory = toy_run(["r3"], tmp_path / "run", **options).directory
        assert len(StoredRun(directory).sums(3)) == 2
        check_repeated(directory, 3, 2, tmp_path / "again")
    finally:
        ray.shutdown()
