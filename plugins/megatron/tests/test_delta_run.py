"""Whole runs of models with gated delta nets. Needs megatron-core; runs on a CPU."""

from importlib.util import find_spec

import pytest

from miles_embedded.testing.families import lacking
from miles_testing import toy_run

INSTALLED = bool(find_spec("megatron")) and find_spec("megatron.core") is not None
pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs megatron-core"), pytest.mark.slow]
# the embedded engine generates
if lacking("qwen3_next"):
    pytestmark.append(pytest.mark.skip(reason=lacking("qwen3_next")))


def data_files(directory):
    """Name -> bytes of the last checkpoint's weights, moments, random-number states and step numbers."""
    [last] = directory.glob("checkpoints/step_00000002")
    policy = last / "policy"
    found = {path.relative_to(policy): path.read_bytes() for path in policy.rglob("*") if path.is_file()}
    return {
        name: data for name, data in found.items() if name.name != ".metadata"
    }  # Megatron-Core's names this run's files


@pytest.mark.parametrize(
    ("hybrid", "plugins"),
    [
        ("qwen3_next", ["r3"]),
        pytest.param("qwen3_5_text", [], marks=pytest.mark.thorough),
        pytest.param("qwen3_5_moe_text", ["r3"], marks=pytest.mark.thorough),
    ],
)
def test_a_run_agrees_with_its_engine_learns_and_continues_as_if_it_had_not_stopped(
    checkpoints, tmp_path, hybrid, plugins
):
    options = {"hf_checkpoint": checkpoints(hybrid), "trainer": "megatron", "dtype": "float32", "lr": 1e-2}
    long = toy_run(plugins, steps=6, rollout_batch_size=4, n_samples_per_prompt=8, **options)
    assert all(record["mismatch/abs_log_prob_max"] < 1e-4 and record["train/grad_norm"] > 0 for record in long.metrics)
    rewards = [record["reward/mean"] for record in long.metrics]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.2
    assert not plugins or long.metrics[-1]["r3/tokens_differing"] < 0.05
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    toy_run(plugins, whole, steps=2, **options)
    toy_run(plugins, parts, steps=1, **options)
    toy_run(plugins, None, steps=2, load=parts, save=None, **options)
    assert data_files(whole) and data_files(whole) == data_files(parts)
